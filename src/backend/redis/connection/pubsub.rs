//! Connections for subscriptions: one to a server, or one to each node of a cluster that has channels which are listened to.
//!
//! The client library can listen to a cluster by itself. It subscribes to all channels of a node in one command, which the node refuses if they are in several
//! slots. It reconnects to an address that is gone, although the slots have moved. It does not notice a node that hangs. Here each connection leads to one
//! node, and the map of slots that commands go by says which node has a channel.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{ErrorKind, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use tokio::sync::{Notify, watch};

use super::connect::Connector;
use crate::backend::redis::cluster::{Address, Cluster};
use crate::backend::redis::error::is_unknown_command;
use crate::backend::redis::sentinel::PrimaryTerm;
use crate::lock::Token;

/// How long it may take to connect to one server, at the least: there may be Sentinels to be asked.
const CONNECT: Duration = Duration::from_secs(1);
/// How long an answer may take at the least, and at the most: whether the connection is alive would not be known for longer.
const ANSWER: Duration = Duration::from_secs(1);
const LONGEST_ANSWER: Duration = Duration::from_secs(5);
/// How often a connection on which nothing comes is asked whether it is alive.
const PING: Duration = Duration::from_secs(5);
/// The same on a cluster, where another node may have taken over meanwhile.
const NODE_PING: Duration = Duration::from_secs(1);

/// Where to listen, with the time that requests have.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) servers: Listened,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
}

/// Which servers send messages.
#[derive(Clone)]
pub(crate) enum Listened {
    One(Connector),
    Cluster(Arc<Cluster>),
}

/// A server that sends the messages of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Server {
    /// There is only one.
    Only,
    Node(Address),
}

/// What somebody who listens is told.
pub(crate) enum Event<'a> {
    /// A channel, and whose turn it is; if that is nobody's in particular, it is for all who listen there.
    Message(&'a str, Option<Token>),
    /// Nothing more comes on a channel: its slot has moved.
    Over(&'a str),
}

/// Channels that could not be subscribed to. Messages of all others come from now on.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) refusal: Option<Refusal>,
    /// Channels that another node has.
    pub(crate) elsewhere: Vec<Arc<str>>,
}

/// Channels that the user may not listen to.
pub(crate) struct Refusal {
    pub(crate) channels: Vec<Arc<str>>,
    pub(crate) missing: Permission,
}

/// What somebody who listens has to be allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    /// The command of this name.
    Command(&'static str),
    Channels,
}

/// A connection that listens to channels. What is heard is told by whoever reads it: nobody has to wake up for that in between.
pub(crate) struct Listener {
    connection: MultiplexedConnection,
    hearing: Arc<Hearing>,
    // With Sentinels: as long as the server is the one that they name.
    tenure: Option<PrimaryTerm>,
    // By sharded channels, which only the nodes of one slot hear of: on a cluster with Redis 7 or Valkey.
    is_sharded: bool,
}

/// State that follows from messages the server sends by itself.
#[derive(Default)]
struct Hearing {
    // The confirmed channels. The client library takes the message that a slot has moved for the reply to the latest command, so a reply alone proves no
    // subscription.
    subscribed: Mutex<HashSet<String>>,
    // Those whose subscriptions this process is ending.
    leaving: Mutex<HashSet<String>>,
    closed: Notify,
}

impl Source {
    /// Whether there is a way to open a connection for subscriptions. A pool opens what it hands out and nothing else.
    pub(crate) const fn can_subscribe(&self) -> bool {
        !matches!(self.servers, Listened::One(Connector::Pool { .. }))
    }

    /// How long it may take to open a connection.
    pub(crate) fn patience(&self) -> Duration {
        CONNECT.max(self.connect_timeout)
    }

    /// How long an answer may take on such a connection.
    pub(crate) fn answer_patience(&self) -> Duration {
        self.response_timeout.clamp(ANSWER, LONGEST_ANSWER)
    }

    /// How often a connection is asked whether it is alive.
    pub(crate) const fn ping_period(&self) -> Duration {
        match self.servers {
            Listened::One(_) => PING,
            Listened::Cluster(_) => NODE_PING,
        }
    }

    /// The server that has a channel, if it is known.
    pub(crate) fn server_of(&self, channel: &str) -> Option<Server> {
        match &self.servers {
            Listened::One(_) => Some(Server::Only),
            Listened::Cluster(cluster) => cluster.owner_of(channel).map(Server::Node),
        }
    }

    /// Has the map of a cluster read anew.
    pub(crate) fn doubt(&self) {
        if let Listened::Cluster(cluster) = &self.servers {
            cluster.doubt();
        }
    }

    /// Each time that the map of a cluster was read.
    pub(crate) fn reads(&self) -> Option<watch::Receiver<()>> {
        match &self.servers {
            Listened::One(_) => None,
            Listened::Cluster(cluster) => Some(cluster.reads()),
        }
    }

    /// Names a server for the log.
    pub(crate) fn name(&self, server: &Server) -> String {
        match (&self.servers, server) {
            (_, Server::Node((host, port))) => format!("{host}:{port}"),
            (Listened::One(connector), Server::Only) => connector.to_string(),
            (Listened::Cluster(_), Server::Only) => "the cluster".to_owned(),
        }
    }

    async fn connect(
        &self,
        server: &Server,
        heard: impl AsyncPushSender,
    ) -> Result<(MultiplexedConnection, Option<PrimaryTerm>), RedisError> {
        match (&self.servers, server) {
            (Listened::One(connector), _) => connector.subscriber(heard).await,
            (Listened::Cluster(cluster), Server::Node(address)) => cluster.connector(address)?.subscriber(heard).await,
            (Listened::Cluster(_), Server::Only) => {
                Err((ErrorKind::ClusterConnectionNotFound, "a cluster has several servers").into())
            }
        }
    }
}

impl Listener {
    /// Tells everything that is heard until the value is dropped.
    pub(crate) async fn open(
        source: &Source,
        server: &Server,
        tell: impl Fn(Event<'_>) + Send + Sync + 'static,
    ) -> Result<Self, RedisError> {
        let hearing = Arc::<Hearing>::default();
        let hears = Arc::clone(&hearing);
        let heard = move |push: PushInfo| {
            hears.hear(&push, &tell);
            Ok::<_, ()>(())
        };
        let (connection, tenure) = source.connect(server, heard).await?;
        Ok(Self { connection, hearing, tenure, is_sharded: matches!(source.servers, Listened::Cluster(_)) })
    }

    /// Subscribes to those of the channels that the user may listen to and that the server has, and says which the others are.
    pub(crate) async fn subscribe(&mut self, channels: &[Arc<str>]) -> Result<Answer, RedisError> {
        if !self.is_sharded {
            match self.connection.subscribe(names(channels)).await {
                Ok(()) => return Ok(Answer::default()),
                Err(error) => {
                    let missing = self.missing(&error).ok_or(error)?;
                    if channels.len() == 1 || missing != Permission::Channels {
                        let refusal = Some(Refusal { channels: channels.to_vec(), missing });
                        return Ok(Answer { refusal, ..Answer::default() });
                    }
                }
            }
        }
        // One command each: a server refuses a command with channels of several slots, or with one channel that the user may not use.
        let answers = join_all(channels.iter().map(|channel| self.subscribe_alone(channel))).await;
        if self.is_sharded && answers.iter().any(|answer| answer.as_ref().is_err_and(is_unknown_command)) {
            // An older server.
            self.is_sharded = false;
            return Box::pin(self.subscribe(channels)).await;
        }
        let (mut refused, mut elsewhere) = (Vec::new(), Vec::new());
        let mut right = None;
        for (channel, answer) in channels.iter().zip(answers) {
            match answer {
                Ok(()) if self.hearing.subscribed().contains(&**channel) => {}
                Ok(()) => elsewhere.push(Arc::clone(channel)),
                Err(error) if is_elsewhere(&error) => elsewhere.push(Arc::clone(channel)),
                Err(error) => {
                    right = Some(self.missing(&error).ok_or(error)?);
                    refused.push(Arc::clone(channel));
                }
            }
        }
        let refusal = right.map(|missing| Refusal { channels: refused, missing });
        Ok(Answer { refusal, elsewhere })
    }

    async fn subscribe_alone(&self, channel: &str) -> Result<(), RedisError> {
        let mut connection = self.connection.clone();
        if self.is_sharded {
            return redis::cmd("SSUBSCRIBE").arg(channel).query_async::<Value>(&mut connection).await.map(drop);
        }
        connection.subscribe(channel).await
    }

    /// What the user lacks, if that is why a subscription was refused.
    fn missing(&self, error: &RedisError) -> Option<Permission> {
        if error.code() != Some("NOPERM") {
            return None;
        }
        let command = if self.is_sharded { "ssubscribe" } else { "subscribe" };
        // Either `... to run the 'subscribe' command` or `... to access a channel`.
        let is_of_channels = error.detail().is_some_and(|detail| detail.contains("channel"));
        Some(if is_of_channels { Permission::Channels } else { Permission::Command(command) })
    }

    pub(crate) async fn unsubscribe(&mut self, channels: &[Arc<str>]) -> Result<(), RedisError> {
        if !self.is_sharded {
            return self.connection.unsubscribe(names(channels)).await;
        }
        // A node that has a channel no more has ended the subscription by itself.
        let subscribed: Vec<_> = channels.iter().filter(|name| self.hearing.subscribed().contains(&***name)).collect();
        self.hearing.leaving().extend(subscribed.iter().map(|name| (**name).to_string()));
        let answers = join_all(subscribed.into_iter().map(async |channel| {
            let mut connection = self.connection.clone();
            redis::cmd("SUNSUBSCRIBE").arg(&**channel).query_async::<Value>(&mut connection).await
        }))
        .await;
        self.hearing.leaving().clear();
        answers.into_iter().find_map(|answer| answer.err().filter(|error| error.code().is_none())).map_or(Ok(()), Err)
    }

    /// Whether the connection is alive.
    pub(crate) async fn ping(&mut self) -> Result<(), RedisError> {
        match redis::cmd("PING").query_async::<Value>(&mut self.connection).await {
            Err(error) if error.is_unrecoverable_error() => Err(error),
            // Somebody who may not ask has an answer as well.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Waits until nothing can be heard any more, or what is heard comes from a primary that has been replaced.
    pub(crate) async fn ended(&self) -> RedisError {
        let reason = match &self.tenure {
            None => {
                self.hearing.closed.notified().await;
                "the connection is closed"
            }
            Some(tenure) => tokio::select! {
                () = self.hearing.closed.notified() => "the connection is closed",
                () = tenure.end() => "the sentinels name another primary",
            },
        };
        (ErrorKind::Io, reason).into()
    }
}

impl Hearing {
    fn subscribed(&self) -> MutexGuard<'_, HashSet<String>> {
        self.subscribed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leaving(&self) -> MutexGuard<'_, HashSet<String>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, push: &PushInfo, tell: impl Fn(Event<'_>)) {
        if push.kind == PushKind::Disconnection {
            self.closed.notify_one();
        }
        let Some(Value::BulkString(channel)) = push.data.first() else { return };
        let channel = String::from_utf8_lossy(channel);
        match push.kind {
            PushKind::Message | PushKind::SMessage => {
                let whose = match push.data.get(1) {
                    Some(Value::BulkString(message)) => Token::from_bytes(message),
                    _ => None,
                };
                tell(Event::Message(&channel, whose));
            }
            PushKind::Subscribe | PushKind::SSubscribe => drop(self.subscribed().insert(channel.into_owned())),
            PushKind::Unsubscribe => drop(self.subscribed().remove(&*channel)),
            PushKind::SUnsubscribe => {
                self.subscribed().remove(&*channel);
                // Somebody may listen there again by now.
                if !self.leaving().remove(&*channel) {
                    tell(Event::Over(&channel));
                }
            }
            _ => {}
        }
    }
}

/// Whether a node says that another node has a channel, or none for now.
fn is_elsewhere(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, ClusterDown, Moved, TryAgain};
    matches!(error.kind(), ErrorKind::Server(Moved | Ask | TryAgain | ClusterDown))
}

fn names(channels: &[Arc<str>]) -> Vec<&str> {
    channels.iter().map(|channel| &**channel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_that_was_asked_for_is_no_news() {
        let (hearing, told) = (Hearing::default(), Mutex::new(Vec::new()));
        let hear = |name: &str| {
            let push =
                PushInfo { kind: PushKind::SUnsubscribe, data: vec![Value::BulkString(name.into()), Value::Int(0)] };
            hearing.hear(&push, |news| {
                if let Event::Over(name) = news {
                    told.lock().unwrap().push(name.to_owned());
                }
            });
        };
        hearing.leaving().insert("a".to_owned());
        hear("a");
        hear("b");
        // It was subscribed to again, and the slot moved later.
        hear("a");
        assert_eq!(*told.lock().unwrap(), ["b", "a"]);
    }
}

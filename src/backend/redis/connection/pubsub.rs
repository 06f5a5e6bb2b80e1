//! Connections for subscriptions: one to a single server, or one to each cluster node with subscribed channels.
//!
//! The cluster subscriptions of the client library are not used. They subscribe to all channels of a node in one command, which the node
//! refuses if the channels are in several slots. They reconnect to an address that is gone, although the slots have moved. They do not
//! notice a node that hangs. Here each connection leads to one node. The slot map that routes commands also decides which node has a
//! channel.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{ErrorKind, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use tokio::sync::{Notify, watch};

use super::connector::Connector;
use crate::backend::redis::address::Address;
use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::error::is_unknown_command;
use crate::backend::redis::sentinel::PrimaryTerm;
use crate::lock::store::Token;

/// The shortest timeout for connecting to one server, since Sentinels may have to be asked first.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The bounds of the reply timeout. The upper bound limits how long a dead connection stays unnoticed.
const MIN_REPLY_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a connection is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// The interval on a cluster, where another node may take over.
const NODE_PING_INTERVAL: Duration = Duration::from_secs(1);

/// Where to subscribe, with the timeouts of requests.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) servers: Publishers,
    pub(crate) connect_timeout: Duration,
    pub(crate) response_timeout: Duration,
}

/// Which servers publish messages.
#[derive(Clone)]
pub(crate) enum Publishers {
    One(Connector),
    Cluster(Arc<Cluster>),
}

/// A server that publishes the messages of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Server {
    /// The only server.
    Only,
    Node(Address),
}

/// An event on a channel.
pub(crate) enum Event<'a> {
    /// A message on a channel. With a token it is for that waiter, otherwise for all listeners.
    Message(&'a str, Option<Token>),
    /// The server ended the subscription because the slot has moved.
    Ended(&'a str),
}

/// Which channels could not be subscribed to. All others deliver messages from now on.
#[derive(Default)]
pub(crate) struct SubscribeOutcome {
    pub(crate) refusal: Option<Refusal>,
    /// Channels that the server does not have, or does not have for now.
    pub(crate) moved: Vec<Arc<str>>,
}

/// Channels that the user may not subscribe to.
pub(crate) struct Refusal {
    pub(crate) channels: Vec<Arc<str>>,
    pub(crate) missing: Permission,
}

/// A permission that the Redis user needs to subscribe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    /// The permission to run this command.
    Command(&'static str),
    /// The permission to access the channels.
    Channels,
}

/// A connection with subscriptions. The task that reads from the connection also delivers the events, so no other task has to wake up.
pub(crate) struct SubscriptionConnection {
    connection: MultiplexedConnection,
    state: Arc<ChannelState>,
    // With Sentinels: ends when they name another primary.
    term: Option<PrimaryTerm>,
    // Sharded channels, whose messages reach only the nodes of one slot: on a cluster with Redis 7 or Valkey.
    is_sharded: bool,
}

/// State that pushed messages change.
#[derive(Default)]
struct ChannelState {
    // The confirmed channels. If a slot moves, the node pushes SUNSUBSCRIBE. The client library takes the push for the reply to the latest
    // command, so a reply alone does not prove a subscription.
    subscribed: Mutex<HashSet<String>>,
    // Channels that this process is unsubscribing from.
    unsubscribing: Mutex<HashSet<String>>,
    closed: Notify,
}

impl Source {
    /// Whether subscriptions are possible. The connections of a pool's manager have no receiver for pushed messages.
    pub(crate) const fn can_subscribe(&self) -> bool {
        !matches!(self.servers, Publishers::One(Connector::Pool { .. }))
    }

    /// The timeout for opening a connection.
    pub(crate) fn open_timeout(&self) -> Duration {
        MIN_CONNECT_TIMEOUT.max(self.connect_timeout)
    }

    /// The timeout for a reply on a connection for subscriptions.
    pub(crate) fn reply_timeout(&self) -> Duration {
        self.response_timeout.clamp(MIN_REPLY_TIMEOUT, MAX_REPLY_TIMEOUT)
    }

    /// How often to ping a connection.
    pub(crate) const fn ping_interval(&self) -> Duration {
        match self.servers {
            Publishers::One(_) => PING_INTERVAL,
            Publishers::Cluster(_) => NODE_PING_INTERVAL,
        }
    }

    /// The server of a channel, if it is known.
    pub(crate) fn server_of(&self, channel: &str) -> Option<Server> {
        match &self.servers {
            Publishers::One(_) => Some(Server::Only),
            Publishers::Cluster(cluster) => cluster.owner_of(channel).map(Server::Node),
        }
    }

    /// Triggers a new read of the cluster's slot map.
    pub(crate) fn refresh_map(&self) {
        if let Publishers::Cluster(cluster) = &self.servers {
            cluster.refresh_map();
        }
    }

    /// Changes after each read of the cluster's slot map.
    pub(crate) fn map_reads(&self) -> Option<watch::Receiver<()>> {
        match &self.servers {
            Publishers::One(_) => None,
            Publishers::Cluster(cluster) => Some(cluster.map_reads()),
        }
    }

    /// Names a server for the log.
    pub(crate) fn name(&self, server: &Server) -> String {
        match (&self.servers, server) {
            (_, Server::Node((host, port))) => format!("{host}:{port}"),
            (Publishers::One(connector), Server::Only) => connector.to_string(),
            (Publishers::Cluster(_), Server::Only) => "the cluster".to_owned(),
        }
    }

    async fn connect(
        &self,
        server: &Server,
        push_sender: impl AsyncPushSender,
    ) -> Result<(MultiplexedConnection, Option<PrimaryTerm>), RedisError> {
        match (&self.servers, server) {
            (Publishers::One(connector), _) => connector.subscriber(push_sender).await,
            (Publishers::Cluster(cluster), Server::Node(address)) => {
                cluster.connector(address)?.subscriber(push_sender).await
            }
            (Publishers::Cluster(_), Server::Only) => {
                Err((ErrorKind::ClusterConnectionNotFound, "a cluster has several servers").into())
            }
        }
    }
}

impl SubscriptionConnection {
    /// Opens a connection that delivers events until it is dropped.
    pub(crate) async fn open(
        source: &Source,
        server: &Server,
        on_event: impl Fn(Event<'_>) + Send + Sync + 'static,
    ) -> Result<Self, RedisError> {
        let state = Arc::<ChannelState>::default();
        let pushed_state = Arc::clone(&state);
        let push_sender = move |push: PushInfo| {
            pushed_state.handle_push(&push, &on_event);
            Ok::<_, ()>(())
        };
        let (connection, term) = source.connect(server, push_sender).await?;
        Ok(Self { connection, state, term, is_sharded: matches!(source.servers, Publishers::Cluster(_)) })
    }

    /// Subscribes to the channels that the user may use and the server has. Returns the others.
    pub(crate) async fn subscribe(&mut self, channels: &[Arc<str>]) -> Result<SubscribeOutcome, RedisError> {
        if !self.is_sharded {
            match self.connection.subscribe(names(channels)).await {
                Ok(()) => return Ok(SubscribeOutcome::default()),
                Err(error) => {
                    let missing = missing_permission(&error, self.is_sharded).ok_or(error)?;
                    if channels.len() == 1 || missing != Permission::Channels {
                        let refusal = Some(Refusal { channels: channels.to_vec(), missing });
                        return Ok(SubscribeOutcome { refusal, ..SubscribeOutcome::default() });
                    }
                }
            }
        }
        // One command for each channel: a server refuses a command with channels of several slots, or with one forbidden channel.
        let replies = join_all(channels.iter().map(|channel| self.subscribe_one(channel))).await;
        if self.is_sharded && replies.iter().any(|reply| reply.as_ref().is_err_and(is_unknown_command)) {
            // Before Redis 7 there are no sharded channels.
            self.is_sharded = false;
            return Box::pin(self.subscribe(channels)).await;
        }
        let (mut refused, mut moved) = (Vec::new(), Vec::new());
        let mut missing = None;
        for (channel, reply) in channels.iter().zip(replies) {
            match reply {
                Ok(()) if self.state.subscribed().contains(&**channel) => {}
                Ok(()) => moved.push(Arc::clone(channel)),
                Err(error) if is_moved(&error) => moved.push(Arc::clone(channel)),
                Err(error) => {
                    missing = Some(missing_permission(&error, self.is_sharded).ok_or(error)?);
                    refused.push(Arc::clone(channel));
                }
            }
        }
        let refusal = missing.map(|missing| Refusal { channels: refused, missing });
        Ok(SubscribeOutcome { refusal, moved })
    }

    async fn subscribe_one(&self, channel: &str) -> Result<(), RedisError> {
        let mut connection = self.connection.clone();
        if self.is_sharded {
            return redis::cmd("SSUBSCRIBE").arg(channel).query_async::<Value>(&mut connection).await.map(drop);
        }
        connection.subscribe(channel).await
    }

    pub(crate) async fn unsubscribe(&mut self, channels: &[Arc<str>]) -> Result<(), RedisError> {
        if !self.is_sharded {
            return self.connection.unsubscribe(names(channels)).await;
        }
        // If a node no longer has a channel, it has ended the subscription itself.
        let subscribed: Vec<_> = channels.iter().filter(|name| self.state.subscribed().contains(&***name)).collect();
        self.state.unsubscribing().extend(subscribed.iter().map(|name| (**name).to_string()));
        let replies = join_all(subscribed.into_iter().map(async |channel| {
            let mut connection = self.connection.clone();
            redis::cmd("SUNSUBSCRIBE").arg(&**channel).query_async::<Value>(&mut connection).await
        }))
        .await;
        self.state.unsubscribing().clear();
        replies.into_iter().find_map(|reply| reply.err().filter(|error| error.code().is_none())).map_or(Ok(()), Err)
    }

    /// Checks that the connection is alive.
    pub(crate) async fn ping(&mut self) -> Result<(), RedisError> {
        match redis::cmd("PING").query_async::<Value>(&mut self.connection).await {
            Err(error) if error.is_unrecoverable_error() => Err(error),
            // A user without permission for PING gets a reply as well.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Waits until the connection is closed, or until its primary has been replaced.
    pub(crate) async fn ended(&self) -> RedisError {
        let reason = match &self.term {
            None => {
                self.state.closed.notified().await;
                "the connection is closed"
            }
            Some(term) => tokio::select! {
                () = self.state.closed.notified() => "the connection is closed",
                () = term.end() => "the sentinels name another primary",
            },
        };
        (ErrorKind::Io, reason).into()
    }
}

impl ChannelState {
    fn subscribed(&self) -> MutexGuard<'_, HashSet<String>> {
        self.subscribed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unsubscribing(&self) -> MutexGuard<'_, HashSet<String>> {
        self.unsubscribing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle_push(&self, push: &PushInfo, on_event: impl Fn(Event<'_>)) {
        if push.kind == PushKind::Disconnection {
            self.closed.notify_one();
        }
        let Some(Value::BulkString(channel)) = push.data.first() else { return };
        let channel = String::from_utf8_lossy(channel);
        match push.kind {
            PushKind::Message | PushKind::SMessage => {
                let token = match push.data.get(1) {
                    Some(Value::BulkString(message)) => Token::from_bytes(message),
                    _ => None,
                };
                on_event(Event::Message(&channel, token));
            }
            PushKind::Subscribe | PushKind::SSubscribe => drop(self.subscribed().insert(channel.into_owned())),
            PushKind::Unsubscribe => drop(self.subscribed().remove(&*channel)),
            PushKind::SUnsubscribe => {
                self.subscribed().remove(&*channel);
                // The push for the client's own SUNSUBSCRIBE is no event: by now, a listener may want the channel again.
                if !self.unsubscribing().remove(&*channel) {
                    on_event(Event::Ended(&channel));
                }
            }
            _ => {}
        }
    }
}

/// Whether a node reports that another node has a channel, or that no node has it for now.
fn is_moved(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, ClusterDown, Moved, TryAgain};
    matches!(error.kind(), ErrorKind::Server(Moved | Ask | TryAgain | ClusterDown))
}

fn names(channels: &[Arc<str>]) -> Vec<&str> {
    channels.iter().map(|channel| &**channel).collect()
}

/// The permission that the user lacks, if that is why a subscription was refused.
fn missing_permission(error: &RedisError, is_sharded: bool) -> Option<Permission> {
    if error.code() != Some("NOPERM") {
        return None;
    }
    let command = if is_sharded { "ssubscribe" } else { "subscribe" };
    // `... permissions to run the 'subscribe' command`, or `... permissions to access a channel`. The text may begin with the user name.
    let is_of_channels = error.detail().is_some_and(|detail| detail.contains("permissions to access"));
    Some(if is_of_channels { Permission::Channels } else { Permission::Command(command) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_permission_does_not_depend_on_the_user_name() {
        let missing = |text: &str| {
            let error = redis::parse_redis_value(format!("-NOPERM {text}\r\n").as_bytes());
            let error = error.and_then(redis::Value::extract_error).unwrap_err();
            missing_permission(&error, true)
        };
        for text in [
            "this user has no permissions to access one of the channels used as arguments",
            "User a has no permissions to access the 'b' channel",
        ] {
            assert!(matches!(missing(text), Some(Permission::Channels)), "{text}");
        }
        let command = missing("User channels has no permissions to run the 'ssubscribe' command");
        assert!(matches!(command, Some(Permission::Command("ssubscribe"))));
    }

    #[test]
    fn own_unsubscription_is_no_event() {
        let (state, ended_channels) = (ChannelState::default(), Mutex::new(Vec::new()));
        let handle_push = |name: &str| {
            let push =
                PushInfo { kind: PushKind::SUnsubscribe, data: vec![Value::BulkString(name.into()), Value::Int(0)] };
            state.handle_push(&push, |event| {
                if let Event::Ended(name) = event {
                    ended_channels.lock().unwrap().push(name.to_owned());
                }
            });
        };
        state.unsubscribing().insert("a".to_owned());
        handle_push("a");
        handle_push("b");
        // The client has subscribed to `a` again, and then its slot moves.
        handle_push("a");
        assert_eq!(*ended_channels.lock().unwrap(), ["b", "a"]);
    }
}

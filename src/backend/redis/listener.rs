//! Connections for subscriptions: to one server, or to the nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{ConnectionInfo, ErrorKind, ProtocolVersion, PushInfo, PushKind, RedisError, Value};
use tokio::sync::Notify;

use super::connector::{Connector, unhindered};
use super::sentinel::Tenure;
use crate::lock::Token;

/// How long it may take to connect to one server, at the least: there may be Sentinels to be asked.
const CONNECT: Duration = Duration::from_secs(1);
/// How long an answer may take at the least, and at the most: whether the connection is alive would not be known for longer.
const ANSWER: Duration = Duration::from_secs(1);
const LONGEST_ANSWER: Duration = Duration::from_secs(5);

/// Where to listen.
#[derive(Clone)]
pub(super) enum Source {
    /// With the time that requests have.
    One {
        connector: Connector,
        connect_timeout: Duration,
        response_timeout: Duration,
    },
    Cluster(Arc<ClusterSource>),
}

/// What the client needs to know of a cluster.
pub(super) struct ClusterSource {
    pub(super) seeds: Vec<ConnectionInfo>,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
    #[cfg(feature = "tls")]
    pub(super) certificates: Option<redis::TlsCertificates>,
}

/// What somebody who listens is told.
pub(super) enum News<'a> {
    /// A channel, and whose turn it is; if that is nobody's in particular, it is for all who listen there.
    Message(&'a str, Option<Token>),
    /// From now on messages come on a channel.
    New(&'a str),
    /// Nothing more comes on a channel: its slot has moved, unless nobody listens to it any more.
    Over(&'a str),
    /// The connection is gone, or was away for a while.
    MaybeMissed,
}

/// Channels that the user may not listen to.
pub(super) struct Refusal {
    pub(super) channels: Vec<Arc<str>>,
    pub(super) missing: Right,
}

/// What somebody who listens has to be allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Right {
    /// The command of this name.
    Command(&'static str),
    Channels,
}

/// A connection that listens to channels. What is heard is told by whoever reads it: nobody has to wake up for that in between.
pub(super) enum Listener {
    One {
        connection: MultiplexedConnection,
        closed: Arc<Notify>,
        // With Sentinels: as long as the server is the one that they name.
        tenure: Option<Tenure>,
    },
    /// The client keeps a connection to each node and finds the one for a channel. This is all that is left to it on a
    /// cluster: to get a message late or twice does no harm.
    Cluster {
        connection: Box<ClusterConnection>,
        // By sharded channels, which only the nodes of one slot hear of: Redis 7 and Valkey have them.
        is_sharded: bool,
    },
}

impl Source {
    /// Whether there is a way to open a connection for subscriptions. A pool opens what it hands out and nothing else.
    pub(super) const fn can_subscribe(&self) -> bool {
        !matches!(self, Self::One { connector: Connector::Pool { .. }, .. })
    }

    /// How long it may take to open a connection.
    pub(super) fn patience(&self) -> Duration {
        match self {
            Self::One { connect_timeout, .. } => CONNECT.max(*connect_timeout),
            // The client waits for each of the nodes that it is told, and then for each of those that these name, also where others have answered.
            Self::Cluster(source) => 2 * source.connect_timeout + self.answer_patience(),
        }
    }

    /// How long an answer may take on such a connection.
    pub(super) fn answer_patience(&self) -> Duration {
        let response_timeout = match self {
            Self::One { response_timeout, .. } => *response_timeout,
            Self::Cluster(source) => source.response_timeout,
        };
        response_timeout.clamp(ANSWER, LONGEST_ANSWER)
    }
}

impl Listener {
    /// Tells everything that is heard until the value is dropped.
    pub(super) async fn open(
        source: &Source,
        tell: impl Fn(News<'_>) + Send + Sync + 'static,
    ) -> Result<Self, RedisError> {
        match source {
            Source::One { connector, .. } => {
                let closed = Arc::new(Notify::new());
                let told = Arc::clone(&closed);
                let tell = move |news: News<'_>| match news {
                    News::MaybeMissed => told.notify_one(),
                    news => tell(news),
                };
                let (connection, tenure) = connector.subscriber(heard(tell)).await?;
                Ok(Self::One { connection, closed, tenure })
            }
            Source::Cluster(source) => {
                let connection = Box::new(source.connect(heard(tell)).await?);
                Ok(Self::Cluster { connection, is_sharded: true })
            }
        }
    }

    /// Subscribes to those of the channels that the user may listen to, and says which the others are.
    pub(super) async fn subscribe(&mut self, channels: &[Arc<str>]) -> Result<Option<Refusal>, RedisError> {
        let missing = match self.subscribe_together(channels).await {
            Ok(()) => return Ok(None),
            Err(error) => self.missing(&error).ok_or(error)?,
        };
        if channels.len() == 1 || missing != Right::Channels {
            return Ok(Some(Refusal { channels: channels.to_vec(), missing }));
        }
        // All of them have been refused for one.
        let answers = join_all(channels.iter().map(|channel| self.subscribe_alone(channel))).await;
        let mut refused = Vec::new();
        for (channel, answer) in channels.iter().zip(answers) {
            match answer {
                Ok(()) => {}
                Err(error) if self.missing(&error).is_some() => refused.push(Arc::clone(channel)),
                Err(error) => return Err(error),
            }
        }
        Ok((!refused.is_empty()).then_some(Refusal { channels: refused, missing }))
    }

    async fn subscribe_together(&mut self, channels: &[Arc<str>]) -> Result<(), RedisError> {
        match self {
            Self::One { connection, .. } => connection.subscribe(names(channels)).await,
            Self::Cluster { connection, is_sharded } => {
                if *is_sharded {
                    match each(channels, |channel| shard_subscribe(connection, channel)).await {
                        // An older server.
                        Err(error) if error.to_string().to_lowercase().contains("unknown command") => {
                            *is_sharded = false;
                        }
                        answer => return answer,
                    }
                }
                connection.subscribe(names(channels)).await
            }
        }
    }

    async fn subscribe_alone(&self, channel: &Arc<str>) -> Result<(), RedisError> {
        match self {
            Self::One { connection, .. } => connection.clone().subscribe(&**channel).await,
            Self::Cluster { connection, is_sharded: true } => shard_subscribe(connection, Arc::clone(channel)).await,
            Self::Cluster { connection, is_sharded: false } => connection.clone().subscribe(&**channel).await,
        }
    }

    /// What the user lacks, if that is why a subscription was refused.
    fn missing(&self, error: &RedisError) -> Option<Right> {
        if error.code() != Some("NOPERM") {
            return None;
        }
        let command = if matches!(self, Self::Cluster { is_sharded: true, .. }) { "ssubscribe" } else { "subscribe" };
        // Either `... to run the 'subscribe' command` or `... to access a channel`.
        let is_of_channels = error.detail().is_some_and(|detail| detail.contains("channel"));
        Some(if is_of_channels { Right::Channels } else { Right::Command(command) })
    }

    pub(super) async fn unsubscribe(&mut self, channels: &[Arc<str>]) -> Result<(), RedisError> {
        match self {
            Self::One { connection, .. } => connection.unsubscribe(names(channels)).await,
            Self::Cluster { connection, is_sharded: true } => {
                each(channels, |channel| {
                    let mut connection = connection.clone();
                    async move { connection.sunsubscribe(&*channel).await }
                })
                .await
            }
            Self::Cluster { connection, is_sharded: false } => connection.unsubscribe(names(channels)).await,
        }
    }

    /// Whether the connection is alive. The client looks after those to a cluster.
    pub(super) async fn ping(&mut self) -> Result<(), RedisError> {
        match self {
            Self::One { connection, .. } => match redis::cmd("PING").query_async::<Value>(connection).await {
                Err(error) if error.is_unrecoverable_error() => Err(error),
                // Somebody who may not ask has an answer as well.
                Ok(_) | Err(_) => Ok(()),
            },
            Self::Cluster { .. } => Ok(()),
        }
    }

    /// Waits until nothing can be heard any more, or what is heard comes from a primary that has been replaced.
    pub(super) async fn ended(&mut self) -> RedisError {
        let reason = match self {
            Self::One { closed, tenure: None, .. } => {
                closed.notified().await;
                "the connection is closed"
            }
            Self::One { closed, tenure: Some(tenure), .. } => tokio::select! {
                () = closed.notified() => "the connection is closed",
                () = tenure.end() => "the sentinels name another primary",
            },
            Self::Cluster { .. } => std::future::pending().await,
        };
        (ErrorKind::Io, reason).into()
    }
}

impl ClusterSource {
    async fn connect(&self, heard: impl AsyncPushSender) -> Result<ClusterConnection, RedisError> {
        let builder = ClusterClientBuilder::new(self.seeds.iter().cloned())
            .use_protocol(ProtocolVersion::RESP3)
            .connection_timeout(self.connect_timeout)
            .tcp_settings(unhindered())
            .push_sender(heard);
        #[cfg(feature = "tls")]
        let builder = match &self.certificates {
            Some(certificates) => builder.certs(certificates.clone()),
            None => builder,
        };
        builder.build()?.get_async_connection().await
    }
}

/// Tells what the server says by itself.
fn heard(tell: impl Fn(News<'_>) + Send + Sync + 'static) -> impl AsyncPushSender {
    move |push: PushInfo| {
        let channel = match push.data.first() {
            Some(Value::BulkString(channel)) => Some(String::from_utf8_lossy(channel)),
            _ => None,
        };
        match (push.kind, channel) {
            (PushKind::Message | PushKind::SMessage, Some(channel)) => {
                let whose = match push.data.get(1) {
                    Some(Value::BulkString(message)) => Token::from_bytes(message),
                    _ => None,
                };
                tell(News::Message(&channel, whose));
            }
            // A channel that is subscribed to anew may have missed something.
            (PushKind::Subscribe | PushKind::SSubscribe, Some(channel)) => tell(News::New(&channel)),
            (PushKind::SUnsubscribe, Some(channel)) => tell(News::Over(&channel)),
            (PushKind::Disconnection, _) => tell(News::MaybeMissed),
            _ => {}
        }
        Ok::<_, ()>(())
    }
}

fn names(channels: &[Arc<str>]) -> Vec<&str> {
    channels.iter().map(|channel| &**channel).collect()
}

/// Channels of several slots cannot share a command.
async fn each<F>(channels: &[Arc<str>], command: impl Fn(Arc<str>) -> F) -> Result<(), RedisError>
where
    F: Future<Output = Result<(), RedisError>>,
{
    try_join_all(channels.iter().map(|channel| command(Arc::clone(channel)))).await.map(drop)
}

fn shard_subscribe(
    connection: &ClusterConnection,
    channel: Arc<str>,
) -> impl Future<Output = Result<(), RedisError>> + use<> {
    let mut connection = connection.clone();
    async move { connection.ssubscribe(&*channel).await }
}

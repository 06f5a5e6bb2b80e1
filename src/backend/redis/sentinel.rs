//! Connections to the current primary of a Sentinel service.
//!
//! The Sentinel queries of the client library are not used. They use `SENTINEL MASTERS`, which names the old primary until the failover is
//! over, a second or more after the new primary has taken over. They query one Sentinel after the other, so they wait for a Sentinel
//! that hangs. They do not notice the replacement of a primary that is still up.

use std::collections::HashMap;
use std::fmt;
use std::future::pending;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, PushInfo, PushKind, RedisError, Value};
use tokio::sync::{Mutex, Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::address::Address;
use super::connection::connect::{open, open_subscriber, with_resp3};
use super::connection::timeout_error::no_connection;
use super::error::{self, is_unknown_command};
use super::peer::Peer;

/// The channels on which Sentinels announce another primary. The Sentinel that leads the failover publishes on both, and the others
/// only on the second, which is later.
const ANNOUNCEMENTS: [&str; 2] = ["+promoted-slave", "+switch-master"];
/// How often to query the Sentinels without an announcement. A primary that is replaced while it is up accepts writes for seconds, until
/// a Sentinel makes it a replica, and all of these writes are lost.
const POLL_INTERVAL: Duration = Duration::from_millis(400);
/// The query timeout is four fifths of the connect timeout, and at most four fifths of this time. Without this bound, the watcher would
/// notice the recovery of a hanging Sentinel too late.
const MAX_QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the other Sentinels after the first reply: a hanging Sentinel should not cost the whole connect timeout.
const STRAGGLER_TIMEOUT: Duration = Duration::from_millis(200);

/// Creates clients for primaries.
pub(crate) type ClientFactory = Box<dyn Fn(&Address) -> Result<Client, RedisError> + Send + Sync>;

/// The Sentinels of a service.
pub(crate) struct Sentinels {
    service: Arc<str>,
    sentinels: Vec<Arc<Sentinel>>,
    open: ClientFactory,
    config: AsyncConnectionConfig,
    // If the query of one Sentinel fails, how long the queries of all Sentinels may take, from their start. It leaves time to use the
    // replies of the other Sentinels.
    query_timeout: Duration,
    connect_timeout: Duration,
    term_number: watch::Sender<u64>,
    tracker: Arc<std::sync::Mutex<PrimaryTracker>>,
    // Notified when a Sentinel announces another primary.
    announced: Arc<Notify>,
    watcher: std::sync::Mutex<AbortHandle>,
}

/// The primaries with which the watcher compares the replies of the Sentinels.
#[derive(Default)]
struct PrimaryTracker {
    // The primary that the watcher accepted last. Before that, the primary of the first connection.
    primary: Option<NamedPrimary>,
    // Another primary to which a connection was opened since then, because the Sentinels that replied to that connection's query named it.
    // If there are several, the one with the lowest epoch.
    unconfirmed: Option<NamedPrimary>,
}

struct Sentinel {
    client: Client,
    config: AsyncConnectionConfig,
    // With a receiver of announcements, which the client library rejects without RESP3.
    push_config: AsyncConnectionConfig,
    // Opened at the first query. Also receives announcements.
    connection: Mutex<Option<MultiplexedConnection>>,
}

/// The reply of a Sentinel: the primary, and the epoch of the failover that promoted it. A higher epoch is newer.
#[derive(Clone, Debug)]
struct NamedPrimary {
    epoch: u64,
    primary: Address,
}

/// The time during which a server is the primary.
#[derive(Debug)]
pub(crate) struct PrimaryTerm {
    number: u64,
    current: watch::Receiver<u64>,
}

impl PrimaryTerm {
    /// Whether the Sentinels have named another primary since the connection was opened.
    pub(crate) fn is_over(&self) -> bool {
        *self.current.borrow() != self.number
    }

    /// Waits until the Sentinels have named another primary.
    pub(crate) async fn end(&self) {
        if self.current.clone().wait_for(|current| *current != self.number).await.is_err() {
            // The watcher is gone.
            pending::<()>().await;
        }
    }
}

impl PrimaryTracker {
    fn connected(&mut self, named: &NamedPrimary) {
        match &self.primary {
            None => self.primary = Some(named.clone()),
            Some(known) if known.primary == named.primary => {}
            Some(_) if self.unconfirmed.as_ref().is_some_and(|unconfirmed| unconfirmed.epoch <= named.epoch) => {}
            Some(_) => self.unconfirmed = Some(named.clone()),
        }
    }

    /// Processes the replies with the highest epoch. Returns whether connections have to be replaced.
    fn observe(&mut self, newest: &[&NamedPrimary], is_unanimous: bool) -> bool {
        let Some(first) = newest.first() else { return false };
        let is_named = |primary: &Address| newest.iter().any(|reply| reply.primary == *primary);
        match &self.primary {
            // Sentinels that know only older primaries are isolated.
            Some(known) if first.epoch < known.epoch && !is_unanimous => false,
            Some(known) if is_named(&known.primary) => {
                // If the unconfirmed primary is neither newer nor another name of the current primary, an isolated Sentinel named it.
                let is_settled = |unconfirmed: &mut NamedPrimary| unconfirmed.epoch <= first.epoch || is_unanimous;
                let settled = self.unconfirmed.take_if(is_settled);
                // A primary that was replaced and came back has a newer epoch.
                self.primary = Some(NamedPrimary { epoch: known.epoch.max(first.epoch), ..known.clone() });
                settled.is_some_and(|unconfirmed| !is_named(&unconfirmed.primary))
            }
            Some(known) if first.epoch <= known.epoch && !is_unanimous => false,
            known => {
                let is_another = known.is_some();
                *self = Self { primary: Some((*first).clone()), unconfirmed: None };
                is_another
            }
        }
    }
}

impl Sentinel {
    /// A Sentinel whose announcements about a service wake the watcher.
    fn new(client: Client, config: &AsyncConnectionConfig, service: &Arc<str>, announced: &Arc<Notify>) -> Self {
        let (service, announced) = (Arc::clone(service), Arc::clone(announced));
        let push_sender = move |push: PushInfo| {
            if push.kind == PushKind::Message && push.data.last().is_some_and(|event| is_about(event, &service)) {
                announced.notify_one();
            }
            Ok::<_, ()>(())
        };
        let push_config = config.clone().set_push_sender(push_sender);
        Self { client, config: config.clone(), push_config, connection: Mutex::default() }
    }

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let mut connection = match open(&with_resp3(&self.client)?, &self.push_config).await {
            // RESP2 delivers no announcements.
            Err(error) if error.kind() == ErrorKind::RESP3NotSupported || is_unknown_command(&error) => {
                return open(&self.client, &self.config).await;
            }
            outcome => outcome?,
        };
        match connection.subscribe(&ANNOUNCEMENTS[..]).await {
            Err(error) if error.is_io_error() => Err(error),
            // If the user may not subscribe, the next query still works or reports the error.
            Ok(()) | Err(_) => Ok(connection),
        }
    }

    async fn query(&self, service: &str) -> Result<NamedPrimary, RedisError> {
        // The connection is taken out during a query, so that an abandoned query leaves no connection with a pending reply.
        let mut slot = self.connection.lock().await;
        if let Some(mut connection) = slot.take()
            && let Ok(named) = query_primary(&mut connection, service).await
        {
            *slot = Some(connection);
            return Ok(named);
        }
        // There was no connection, or the query over it failed.
        let mut connection = self.connect().await?;
        let named = query_primary(&mut connection, service).await?;
        *slot = Some(connection);
        Ok(named)
    }
}

/// Whether an announcement is about a service. It contains the service's name: as the first word of `+switch-master`, and after the
/// promoted server in `+promoted-slave`.
fn is_about(event: &Value, service: &str) -> bool {
    matches!(event, Value::BulkString(event) if event.split(|byte| *byte == b' ').any(|word| word == service.as_bytes()))
}

async fn query_primary(connection: &mut MultiplexedConnection, service: &str) -> Result<NamedPrimary, RedisError> {
    // The epoch first: a failover between the two commands then makes a new primary look old, and not the reverse.
    let master = redis::cmd("SENTINEL").arg("MASTER").arg(service).query_async(connection).await;
    let master: HashMap<String, String> = master.map_err(sentinel_error)?;
    let epoch = master.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or_default();
    let mut address = redis::cmd("SENTINEL");
    address.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
    let primary: Option<Address> = address.query_async(connection).await?;
    Ok(NamedPrimary { epoch, primary: primary.ok_or_else(unknown_service)? })
}

impl Sentinels {
    pub(crate) fn new(
        service: &str,
        sentinels: Vec<Client>,
        open: ClientFactory,
        config: AsyncConnectionConfig,
        connect_timeout: Duration,
    ) -> Self {
        let (service, announced) = (Arc::from(service), Arc::default());
        let sentinel = |client| Arc::new(Sentinel::new(client, &config, &service, &announced));
        let sentinels: Vec<_> = sentinels.into_iter().map(sentinel).collect();
        let (term_number, tracker) = (watch::Sender::new(0), Arc::default());
        let query_timeout = connect_timeout.min(MAX_QUERY_TIMEOUT) * 4 / 5;
        let watcher = std::sync::Mutex::new(spawn_watcher(
            &service,
            &sentinels,
            query_timeout,
            &term_number,
            &tracker,
            &announced,
        ));
        Self {
            service,
            sentinels,
            open,
            config,
            query_timeout,
            connect_timeout,
            term_number,
            tracker,
            announced,
            watcher,
        }
    }

    /// If the runtime of the watcher has ended, starts a watcher in the current one.
    fn ensure_watcher(&self) {
        let mut current = self.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_finished() {
            let Self { service, sentinels, query_timeout, term_number, tracker, announced, .. } = self;
            *current = spawn_watcher(service, sentinels, *query_timeout, term_number, tracker, announced);
        }
    }

    /// Connects to the primary.
    pub(crate) async fn connect(&self) -> Result<(MultiplexedConnection, PrimaryTerm), RedisError> {
        let term = self.term();
        self.primary(&term).await.map(|(_, connection)| (connection, term))
    }

    /// Like [`connect`](Self::connect), for subscriptions.
    pub(crate) async fn subscriber(
        &self,
        push_sender: impl AsyncPushSender,
    ) -> Result<(MultiplexedConnection, PrimaryTerm), RedisError> {
        let term = self.term();
        let (client, _) = self.primary(&term).await?;
        open_subscriber(&client, push_sender).await.map(|connection| (connection, term))
    }

    /// The current term. Called before the Sentinels are queried: if the watcher learns of another primary meanwhile, the term is over.
    fn term(&self) -> PrimaryTerm {
        self.ensure_watcher();
        PrimaryTerm { number: *self.term_number.borrow(), current: self.term_number.subscribe() }
    }

    /// Connects to the newest primary that a Sentinel names, if `ROLE` confirms it.
    ///
    /// Queries all Sentinels first: an isolated Sentinel keeps naming an old primary, which may still accept connections.
    async fn primary(&self, term: &PrimaryTerm) -> Result<(Client, MultiplexedConnection), RedisError> {
        // Before the caller's timeout, so that the error names the server that does not reply.
        let until = Instant::now() + self.connect_timeout * 9 / 10;
        let (replies, failure) = query_all(&self.service, self.sentinels.iter().cloned(), self.query_timeout).await;
        let mut failure = match failure {
            // Every Sentinel that replied does not know the service.
            Some(error) if replies.is_empty() && is_unknown(&error) => return Err(unknown_to_all(&self.service)),
            // Another Sentinel knows the service, so this error does not matter.
            failure => failure.filter(|error| !is_unknown(error)),
        };
        let mut tried: Vec<&Address> = Vec::new();
        for named in newest(&replies) {
            if tried.contains(&&named.primary) {
                continue;
            }
            tried.push(&named.primary);
            let connected = timeout_at(until, self.connect_to(&named.primary)).await;
            match connected.unwrap_or_else(|_| Err(no_connection(self.connect_timeout))) {
                Ok(connected) => {
                    let mut tracker = lock(&self.tracker);
                    // If the term is over, this connection is replaced anyway, so the tracker does not need its primary.
                    if !term.is_over() {
                        tracker.connected(named);
                    }
                    return Ok(connected);
                }
                Err(error) => {
                    let (host, port) = named.primary.clone();
                    let primary = Peer::Primary(ConnectionAddr::Tcp(host, port));
                    failure = Some(more_specific(failure, error::with_peer(primary, error)));
                }
            }
        }
        Err(failure.unwrap_or_else(replaced))
    }

    async fn connect_to(&self, primary: &Address) -> Result<(Client, MultiplexedConnection), RedisError> {
        let client = (self.open)(primary)?;
        let mut connection = open(&client, &self.config).await?;
        let role: Vec<Value> = redis::cmd("ROLE").query_async(&mut connection).await?;
        let role = role.into_iter().next().and_then(|role| redis::from_redis_value::<String>(role).ok());
        if role.is_none_or(|role| role != "master") {
            return Err(replaced());
        }
        Ok((client, connection))
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        self.watcher.get_mut().unwrap_or_else(PoisonError::into_inner).abort();
    }
}

/// The replies in time, and the most specific error. After the first reply, the other Sentinels have [`STRAGGLER_TIMEOUT`] left. After a
/// failure, they have `query_timeout` in total. Without either, the caller's timeout applies.
async fn query_all(
    service: &Arc<str>,
    sentinels: impl Iterator<Item = Arc<Sentinel>>,
    query_timeout: Duration,
) -> (Vec<NamedPrimary>, Option<RedisError>) {
    let mut pending_queries = JoinSet::new();
    for sentinel in sentinels {
        let service = Arc::clone(service);
        pending_queries.spawn(async move {
            let reply = sentinel.query(&service).await;
            reply.map_err(|error| {
                let address = sentinel.client.get_connection_info().addr().clone();
                error::with_peer(Peer::Sentinel(address), error)
            })
        });
    }
    let (mut replies, mut failure) = (Vec::new(), None);
    let mut until = Instant::now() + query_timeout;
    loop {
        let reply = tokio::select! {
            reply = pending_queries.join_next() => reply,
            () = sleep_until(until), if failure.is_some() || !replies.is_empty() => None,
        };
        match reply {
            Some(Ok(Ok(named))) => {
                until = until.min(Instant::now() + STRAGGLER_TIMEOUT);
                replies.push(named);
            }
            Some(Ok(Err(error))) => failure = Some(more_specific(failure, error)),
            // The task was dropped with the runtime.
            Some(Err(_)) => {}
            None => return (replies, failure),
        }
    }
}

/// The replies with the highest epoch. Their addresses differ if Sentinels use different names for one server.
fn newest(replies: &[NamedPrimary]) -> Vec<&NamedPrimary> {
    let epoch = replies.iter().map(|reply| reply.epoch).max();
    replies.iter().filter(|reply| Some(reply.epoch) == epoch).collect()
}

/// Starts a task that ends the term of a primary when the Sentinels name a newer one.
fn spawn_watcher(
    service: &Arc<str>,
    sentinels: &[Arc<Sentinel>],
    query_timeout: Duration,
    term_number: &watch::Sender<u64>,
    tracker: &Arc<std::sync::Mutex<PrimaryTracker>>,
    announced: &Arc<Notify>,
) -> AbortHandle {
    let weak = sentinels.iter().map(Arc::downgrade).collect();
    let (service, tracker, announced) = (Arc::clone(service), Arc::clone(tracker), Arc::clone(announced));
    tokio::spawn(watch_primary(service, weak, query_timeout, term_number.clone(), tracker, announced)).abort_handle()
}

async fn watch_primary(
    service: Arc<str>,
    sentinels: Vec<Weak<Sentinel>>,
    query_timeout: Duration,
    term_number: watch::Sender<u64>,
    tracker: Arc<std::sync::Mutex<PrimaryTracker>>,
    announced: Arc<Notify>,
) {
    loop {
        let queries = query_all(&service, sentinels.iter().filter_map(Weak::upgrade), query_timeout);
        let (replies, _) = timeout(query_timeout + STRAGGLER_TIMEOUT, queries).await.unwrap_or_default();
        let newest = newest(&replies);
        if let Some(first) = newest.first() {
            // If all Sentinels name the same primary, it counts whatever its epoch: an operator may have told them to monitor another
            // server.
            let is_unanimous =
                replies.len() == sentinels.len() && replies.iter().all(|reply| reply.primary == first.primary);
            let mut tracker = lock(&tracker);
            if tracker.observe(&newest, is_unanimous) {
                let (host, port) = &first.primary;
                tracing::info!(%service, host, port, "the sentinels name another primary");
                term_number.send_modify(|number| *number += 1);
            }
        }
        // An announcement only triggers a query of all Sentinels, since the Sentinel that sent it may be isolated.
        let _ = timeout(POLL_INTERVAL, announced.notified()).await;
    }
}

fn lock(tracker: &std::sync::Mutex<PrimaryTracker>) -> MutexGuard<'_, PrimaryTracker> {
    tracker.lock().unwrap_or_else(PoisonError::into_inner)
}

fn replaced() -> RedisError {
    (ErrorKind::MasterNameNotFoundBySentinel, "the primary that a Sentinel names has been replaced").into()
}

fn unknown_service() -> RedisError {
    (ErrorKind::MasterNameNotFoundBySentinel, "name not found in sentinel").into()
}

fn is_unknown(error: &RedisError) -> bool {
    error::inner(error).kind() == ErrorKind::MasterNameNotFoundBySentinel
}

fn unknown_to_all(service: &str) -> RedisError {
    let reason = format!("no Sentinel watches over `{service}`");
    (ErrorKind::MasterNameNotFoundBySentinel, "name not found in sentinel", reason).into()
}

/// Maps the errors of a Sentinel without the service, and of a server that is not a Sentinel.
fn sentinel_error(error: RedisError) -> RedisError {
    match error.detail() {
        Some(detail) if detail.contains("No such master") => unknown_service(),
        Some(detail) if detail.contains("unknown command") => {
            (ErrorKind::InvalidClientConfig, "the address does not point to a sentinel").into()
        }
        _ => error,
    }
}

/// The more specific of two errors. A refusal by a server is most specific, then an unknown service or a replaced primary, and then an
/// unreachable server.
fn more_specific(known: Option<RedisError>, error: RedisError) -> RedisError {
    let specificity = |error: &RedisError| match error::inner(error).kind() {
        ErrorKind::Io => 0,
        ErrorKind::MasterNameNotFoundBySentinel => 1,
        _ => 2,
    };
    match known {
        Some(known) if specificity(&known) >= specificity(&error) && specificity(&known) > 0 => known,
        _ => error,
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the primary of {}", self.service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(epoch: u64, host: &str) -> NamedPrimary {
        NamedPrimary { epoch, primary: (host.to_owned(), 6379) }
    }

    #[test]
    fn primary_of_isolated_sentinel_is_left() {
        let (old, new, next) = (named(5, "old"), named(6, "new"), named(7, "next"));
        let mut tracker = PrimaryTracker::default();
        tracker.connected(&new);
        assert!(!tracker.observe(&[&new], false));
        tracker.connected(&old);
        assert!(!tracker.observe(&[&old], false), "no other Sentinel has replied");
        assert!(tracker.observe(&[&new], false));
        assert!(!tracker.observe(&[&new], false));
        // A primary that is newer than the last announcement is not from an isolated Sentinel.
        tracker.connected(&next);
        assert!(!tracker.observe(&[&new], false));
        assert!(tracker.observe(&[&next], false));
        assert!(!tracker.observe(&[&next], false));
    }

    #[test]
    fn isolated_sentinel_does_not_end_the_term_of_a_known_primary() {
        let (first, between, again) = (named(5, "a"), named(6, "b"), named(7, "a"));
        let mut tracker = PrimaryTracker::default();
        tracker.connected(&first);
        assert!(!tracker.observe(&[&again], false), "nobody heard of `b`");
        assert!(!tracker.observe(&[&between], false), "only the isolated Sentinel replied");
    }

    #[test]
    fn aliases_of_one_primary_do_not_end_its_term() {
        let (one, other) = (named(6, "10.0.0.1"), named(6, "redis.internal"));
        let mut tracker = PrimaryTracker::default();
        tracker.connected(&one);
        for _ in 0..3 {
            tracker.connected(&other);
            assert!(!tracker.observe(&[&other, &one], false));
        }
    }

    /// Without announcements, the next query comes 0.4 s after the last one.
    #[tokio::test]
    async fn announcement_triggers_query() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let sentinel = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let info =
            redis::IntoConnectionInfo::into_connection_info(format!("redis://{}/", sentinel.local_addr().unwrap()));
        let settings = redis::RedisConnectionInfo::default().set_skip_set_lib_name();
        let client = Client::open(info.unwrap().set_redis_settings(settings)).unwrap();
        let open: ClientFactory = Box::new(|_| Err(unknown_service()));
        let long = Duration::from_secs(60);
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(long));
        let _sentinels = Sentinels::new("orders", vec![client], open, config, long);
        let (mut connection, _) = sentinel.accept().await.unwrap();
        let (mut queries, mut unread) = (Vec::new(), String::new());
        while queries.len() < 10 {
            let mut read = [0; 1_024];
            let length = connection.read(&mut read).await.unwrap();
            unread += &String::from_utf8_lossy(&read[..length]);
            // Each word is on its own line, after the line with its length.
            let words: Vec<&str> = unread.lines().skip(2).step_by(2).collect();
            let reply = match words[0] {
                "HELLO" => "%0\r\n".to_owned(),
                "SUBSCRIBE" => ANNOUNCEMENTS
                    .map(|name| format!(">3\r\n$9\r\nsubscribe\r\n${}\r\n{name}\r\n:1\r\n", name.len()))
                    .concat(),
                "SENTINEL" if words[1] == "MASTER" => {
                    queries.push(Instant::now());
                    "%1\r\n$12\r\nconfig-epoch\r\n$1\r\n1\r\n".to_owned()
                }
                "SENTINEL" => {
                    let others = ">3\r\n$7\r\nmessage\r\n$14\r\n+switch-master\r\n$8\r\npayments\r\n";
                    let ours = ">3\r\n$7\r\nmessage\r\n$14\r\n+switch-master\r\n$10\r\norders a b\r\n";
                    // Announcements of other services are ignored.
                    let event = if queries.len() % 2 == 0 { ours } else { others };
                    format!("*2\r\n$9\r\n127.0.0.1\r\n$1\r\n1\r\n{event}")
                }
                _ => "+OK\r\n".to_owned(),
            };
            unread.clear();
            connection.write_all(reply.as_bytes()).await.unwrap();
        }
        let pauses: Vec<_> = queries.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (others, ours): (Vec<_>, Vec<_>) =
            (pauses.iter().step_by(2).collect(), pauses.iter().skip(1).step_by(2).collect());
        assert!(ours.iter().all(|pause| **pause < POLL_INTERVAL), "{pauses:?}");
        assert!(others.iter().all(|pause| **pause >= POLL_INTERVAL), "{pauses:?}");
    }

    /// Regression: the client library rejects a receiver of announcements without RESP3, so every connection failed.
    #[tokio::test]
    async fn sentinel_without_hello_is_queried() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let info = redis::IntoConnectionInfo::into_connection_info(url).unwrap();
        let settings = redis::RedisConnectionInfo::default().set_skip_set_lib_name();
        let client = Client::open(info.set_redis_settings(settings)).unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            // The first connection is refused, and the second one is used.
            for _ in 0..2 {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut read = [0; 1_024];
                while let Ok(length @ 1..) = connection.read(&mut read).await {
                    let command = String::from_utf8_lossy(&read[..length]).into_owned();
                    let reply = if command.contains("HELLO") {
                        "-ERR unknown command 'HELLO', with args beginning with: '3'\r\n"
                    } else if command.contains("GET-MASTER-ADDR-BY-NAME") {
                        "*2\r\n$9\r\n127.0.0.1\r\n$1\r\n1\r\n"
                    } else {
                        "*2\r\n$12\r\nconfig-epoch\r\n$1\r\n7\r\n"
                    };
                    connection.write_all(reply.as_bytes()).await.unwrap();
                }
            }
        });
        let sentinel = Sentinel::new(client, &AsyncConnectionConfig::new(), &Arc::from("orders"), &Arc::default());
        let reply = timeout(Duration::from_secs(10), sentinel.query("orders")).await.unwrap().unwrap();
        assert_eq!((reply.epoch, reply.primary), (7, ("127.0.0.1".to_owned(), 1)));
    }
}

//! Connections to whichever server is the primary of a service at the moment.
//!
//! The client library can ask Sentinels as well. It goes by `SENTINEL MASTERS`, which names the old primary until a failover is
//! over, a second or more after the new one has taken over; it asks one Sentinel after the other, and so waits for one that
//! hangs; and it does not notice that a primary is replaced which is not down.

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

use super::cluster::Address;
use super::connect_error::Peer;
use super::connection::connect::{listen, open, pushing};
use super::connection::pool::no_connection;
use super::error::{self, is_unknown_command};

/// What Sentinels publish when there is another primary: the one that leads a failover names the new primary from the first of them on, and the
/// others from the second on.
const ANNOUNCEMENTS: [&str; 2] = ["+promoted-slave", "+switch-master"];
/// How often the Sentinels are asked whether there is another primary, where none announces it. A server that has been replaced without being down
/// goes on to count for seconds, until a Sentinel makes it a replica, and all of that is lost.
const WATCH: Duration = Duration::from_millis(400);
/// The longest time that is spent on asking them: of one that hangs it would not be known otherwise that it answers again.
const LONGEST_LOOK: Duration = Duration::from_secs(10);
/// How long a Sentinel may take to say it, once another one has: one that hangs should not cost the whole time that there is to connect.
const PATIENCE: Duration = Duration::from_millis(200);

/// Makes clients for primaries.
pub(crate) type Opener = Box<dyn Fn(&Address) -> Result<Client, RedisError> + Send + Sync>;

/// The Sentinels of a service.
pub(crate) struct Sentinels {
    service: Arc<str>,
    sentinels: Vec<Arc<Sentinel>>,
    open: Opener,
    config: AsyncConnectionConfig,
    // How long those have to answer who have to be connected to. There is time left then to make something of what the others say.
    look: Duration,
    connect_timeout: Duration,
    tenures: watch::Sender<u64>,
    known: Arc<std::sync::Mutex<Known>>,
    // Sentinels have announced another primary.
    announced: Arc<Notify>,
    watcher: std::sync::Mutex<AbortHandle>,
}

/// What those who watch compare with what they hear.
#[derive(Default)]
struct Known {
    // The primary that was announced last, or connected to before: it may be another one already when they hear something for the first time.
    primary: Option<Announcement>,
    // Another one that was connected to since, on the word of whichever Sentinel had answered. Of several the one that was announced with the
    // lowest number.
    unconfirmed: Option<Announcement>,
}

struct Sentinel {
    client: Client,
    config: AsyncConnectionConfig,
    // The same for connections by which announcements come. The client library refuses it where they do not.
    pushing: AsyncConnectionConfig,
    // Opened when it is first needed. Announcements come by it as well.
    connection: Mutex<Option<MultiplexedConnection>>,
}

/// What a Sentinel says: which server is the primary, and the number of the failover that made it one. The higher is the newer.
#[derive(Clone, Debug)]
struct Announcement {
    epoch: u64,
    primary: Address,
}

/// How long a connection ends at the primary.
#[derive(Debug)]
pub(crate) struct PrimaryTerm {
    number: u64,
    now: watch::Receiver<u64>,
}

impl PrimaryTerm {
    /// Whether the Sentinels have named another primary since the connection was opened.
    pub(crate) fn is_over(&self) -> bool {
        *self.now.borrow() != self.number
    }

    /// Waits for that.
    pub(crate) async fn end(&self) {
        if self.now.clone().wait_for(|now| *now != self.number).await.is_err() {
            // Nobody asks the Sentinels any more.
            pending::<()>().await;
        }
    }
}

impl Known {
    fn connected(&mut self, announced: &Announcement) {
        match &self.primary {
            None => self.primary = Some(announced.clone()),
            Some(known) if known.primary == announced.primary => {}
            Some(_) if self.unconfirmed.as_ref().is_some_and(|unconfirmed| unconfirmed.epoch <= announced.epoch) => {}
            Some(_) => self.unconfirmed = Some(announced.clone()),
        }
    }

    /// Whether connections are to be opened anew after what the newest announcements say.
    fn heard(&mut self, newest: &[&Announcement], is_unanimous: bool) -> bool {
        let Some(first) = newest.first() else { return false };
        let is_named = |primary: &Address| newest.iter().any(|answer| answer.primary == *primary);
        match &self.primary {
            // Sentinels that know only of older ones are out of touch.
            Some(known) if first.epoch < known.epoch && !is_unanimous => false,
            Some(known) if is_named(&known.primary) => {
                // What one of those has named, unless the Sentinels only call one server by different names, or it is a newer one.
                let is_heard = |unconfirmed: &mut Announcement| unconfirmed.epoch <= first.epoch || is_unanimous;
                self.unconfirmed.take_if(is_heard).is_some_and(|unconfirmed| !is_named(&unconfirmed.primary))
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
    /// A Sentinel whose announcements for a service wake up the watcher.
    fn new(client: Client, config: &AsyncConnectionConfig, service: &Arc<str>, announced: &Arc<Notify>) -> Self {
        let (service, announced) = (Arc::clone(service), Arc::clone(announced));
        let heard = move |push: PushInfo| {
            if push.kind == PushKind::Message && push.data.last().is_some_and(|event| is_about(event, &service)) {
                announced.notify_one();
            }
            Ok::<_, ()>(())
        };
        let pushing = config.clone().set_push_sender(heard);
        Self { client, config: config.clone(), pushing, connection: Mutex::default() }
    }

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        let mut connection = match open(&pushing(&self.client)?, &self.pushing).await {
            // Announcements do not come by this protocol.
            Err(error) if error.kind() == ErrorKind::RESP3NotSupported || is_unknown_command(&error) => {
                return open(&self.client, &self.config).await;
            }
            outcome => outcome?,
        };
        match connection.subscribe(&ANNOUNCEMENTS[..]).await {
            Err(error) if error.is_io_error() => Err(error),
            // A user who may not subscribe is told when the Sentinel is asked next.
            Ok(()) | Err(_) => Ok(connection),
        }
    }

    async fn ask(&self, service: &str) -> Result<Announcement, RedisError> {
        // Whoever gives up half way leaves no connection behind on which an answer is still to come.
        let mut kept = self.connection.lock().await;
        if let Some(mut connection) = kept.take()
            && let Ok(announced) = announcement(&mut connection, service).await
        {
            *kept = Some(connection);
            return Ok(announced);
        }
        // There was none, or the Sentinel has been restarted since.
        let mut connection = self.connect().await?;
        let announced = announcement(&mut connection, service).await?;
        *kept = Some(connection);
        Ok(announced)
    }
}

/// Whether a Sentinel says something about a service: it names the service by itself, or after the server that the event is about.
fn is_about(event: &Value, service: &str) -> bool {
    matches!(event, Value::BulkString(event) if event.split(|byte| *byte == b' ').any(|word| word == service.as_bytes()))
}

async fn announcement(connection: &mut MultiplexedConnection, service: &str) -> Result<Announcement, RedisError> {
    // The number first: a failover in between makes a new primary look old then, and not the other way round.
    let known = redis::cmd("SENTINEL").arg("MASTER").arg(service).query_async(connection).await;
    let known: HashMap<String, String> = known.map_err(plain)?;
    let epoch = known.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or_default();
    let mut address = redis::cmd("SENTINEL");
    address.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
    let primary: Option<Address> = address.query_async(connection).await?;
    Ok(Announcement { epoch, primary: primary.ok_or_else(unknown_service)? })
}

impl Sentinels {
    pub(crate) fn new(
        service: &str,
        sentinels: Vec<Client>,
        open: Opener,
        config: AsyncConnectionConfig,
        connect_timeout: Duration,
    ) -> Self {
        let (service, announced) = (Arc::from(service), Arc::default());
        let sentinel = |client| Arc::new(Sentinel::new(client, &config, &service, &announced));
        let sentinels: Vec<_> = sentinels.into_iter().map(sentinel).collect();
        let (tenures, known) = (watch::Sender::new(0), Arc::default());
        let look = connect_timeout.min(LONGEST_LOOK) * 4 / 5;
        let watcher = std::sync::Mutex::new(watcher(&service, &sentinels, look, &tenures, &known, &announced));
        Self { service, sentinels, open, config, look, connect_timeout, tenures, known, announced, watcher }
    }

    /// Watches on in this runtime if the one has ended in which that was done.
    fn watch_on(&self) {
        let mut watched = self.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.is_finished() {
            let Self { service, sentinels, look, tenures, known, announced, .. } = self;
            *watched = watcher(service, sentinels, *look, tenures, known, announced);
        }
    }

    /// Connects to the primary.
    pub(crate) async fn connect(&self) -> Result<(MultiplexedConnection, PrimaryTerm), RedisError> {
        let tenure = self.tenure();
        self.primary(&tenure).await.map(|(_, connection)| (connection, tenure))
    }

    /// The same, for subscriptions.
    pub(crate) async fn subscriber(
        &self,
        heard: impl AsyncPushSender,
    ) -> Result<(MultiplexedConnection, PrimaryTerm), RedisError> {
        let tenure = self.tenure();
        let (client, _) = self.primary(&tenure).await?;
        listen(&client, heard).await.map(|connection| (connection, tenure))
    }

    /// That of whoever is named from now on. Before anything is asked: what is announced meanwhile may not be what is connected to.
    fn tenure(&self) -> PrimaryTerm {
        self.watch_on();
        PrimaryTerm { number: *self.tenures.borrow(), now: self.tenures.subscribe() }
    }

    /// The newest primary that a Sentinel names, if that server takes itself for a primary, too.
    ///
    /// All of them are asked before anything is connected to: one that is cut off from the others goes on to name a server that may not even refuse.
    async fn primary(&self, tenure: &PrimaryTerm) -> Result<(Client, MultiplexedConnection), RedisError> {
        // Before the caller gives up, so that it learns which server does not answer.
        let until = Instant::now() + self.connect_timeout * 9 / 10;
        let (answers, worst) = ask_all(&self.service, self.sentinels.iter().cloned(), self.look).await;
        let mut worst = match worst {
            // All that have answered say so.
            Some(error) if answers.is_empty() && is_unknown(&error) => return Err(watched_by_nobody(&self.service)),
            // Another one knows it.
            worst => worst.filter(|error| !is_unknown(error)),
        };
        let mut tried: Vec<&Address> = Vec::new();
        for announced in newest(&answers) {
            if tried.contains(&&announced.primary) {
                continue;
            }
            tried.push(&announced.primary);
            let connected = timeout_at(until, self.connect_to(&announced.primary)).await;
            match connected.unwrap_or_else(|_| Err(no_connection(self.connect_timeout))) {
                Ok(connected) => {
                    let mut known = lock(&self.known);
                    // One that is left anyway says nothing of the others.
                    if !tenure.is_over() {
                        known.connected(announced);
                    }
                    return Ok(connected);
                }
                Err(error) => {
                    let (host, port) = announced.primary.clone();
                    let primary = Peer::Primary(ConnectionAddr::Tcp(host, port));
                    worst = Some(telling(worst, error::at(primary, error)));
                }
            }
        }
        Err(worst.unwrap_or_else(replaced))
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

/// What those say that answer in time, and why others did not. Once one has answered, the others have [`PATIENCE`] left. While none has said anything, they
/// are waited for.
async fn ask_all(
    service: &Arc<str>,
    sentinels: impl Iterator<Item = Arc<Sentinel>>,
    look: Duration,
) -> (Vec<Announcement>, Option<RedisError>) {
    let mut asked = JoinSet::new();
    for sentinel in sentinels {
        let service = Arc::clone(service);
        asked.spawn(async move {
            let answer = sentinel.ask(&service).await;
            answer.map_err(|error| {
                let address = sentinel.client.get_connection_info().addr().clone();
                error::at(Peer::Sentinel(address), error)
            })
        });
    }
    let (mut answers, mut worst) = (Vec::new(), None);
    let mut until = Instant::now() + look;
    loop {
        let answer = tokio::select! {
            answer = asked.join_next() => answer,
            () = sleep_until(until), if worst.is_some() || !answers.is_empty() => None,
        };
        match answer {
            Some(Ok(Ok(announced))) => {
                until = until.min(Instant::now() + PATIENCE);
                answers.push(announced);
            }
            Some(Ok(Err(error))) => worst = Some(telling(worst, error)),
            // The task was dropped with the runtime.
            Some(Err(_)) => {}
            None => return (answers, worst),
        }
    }
}

/// The newest of them. They differ where Sentinels call one server by different names.
fn newest(answers: &[Announcement]) -> Vec<&Announcement> {
    let epoch = answers.iter().map(|answer| answer.epoch).max();
    answers.iter().filter(|answer| Some(answer.epoch) == epoch).collect()
}

/// Ends the tenure of a primary once a newer one is announced, for as long as there are the Sentinels to ask.
fn watcher(
    service: &Arc<str>,
    sentinels: &[Arc<Sentinel>],
    look: Duration,
    tenures: &watch::Sender<u64>,
    known: &Arc<std::sync::Mutex<Known>>,
    announced: &Arc<Notify>,
) -> AbortHandle {
    let watched = sentinels.iter().map(Arc::downgrade).collect();
    let (service, known, announced) = (Arc::clone(service), Arc::clone(known), Arc::clone(announced));
    tokio::spawn(follow(service, watched, look, tenures.clone(), known, announced)).abort_handle()
}

async fn follow(
    service: Arc<str>,
    sentinels: Vec<Weak<Sentinel>>,
    look: Duration,
    tenures: watch::Sender<u64>,
    known: Arc<std::sync::Mutex<Known>>,
    announced: Arc<Notify>,
) {
    loop {
        let asked = ask_all(&service, sentinels.iter().filter_map(Weak::upgrade), look);
        let (answers, _) = timeout(look + PATIENCE, asked).await.unwrap_or_default();
        let newest = newest(&answers);
        if let Some(first) = newest.first() {
            // If none is missing, and none knows of the one that was announced, they were told to watch over another one.
            let is_unanimous =
                answers.len() == sentinels.len() && answers.iter().all(|answer| answer.primary == first.primary);
            let mut known = lock(&known);
            if known.heard(&newest, is_unanimous) {
                let (host, port) = &first.primary;
                tracing::info!(%service, host, port, "the sentinels name another primary");
                tenures.send_modify(|number| *number += 1);
            }
        }
        // All of them are asked, as always: whether an announcement is to be believed depends on what the others know.
        let _ = timeout(WATCH, announced.notified()).await;
    }
}

fn lock(known: &std::sync::Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
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

fn watched_by_nobody(service: &str) -> RedisError {
    let reason = format!("no Sentinel watches over `{service}`");
    (ErrorKind::MasterNameNotFoundBySentinel, "name not found in sentinel", reason).into()
}

/// What the answers mean that are not about credentials.
fn plain(error: RedisError) -> RedisError {
    match error.detail() {
        Some(detail) if detail.contains("No such master") => unknown_service(),
        Some(detail) if detail.contains("unknown command") => {
            (ErrorKind::InvalidClientConfig, "the address does not point to a sentinel").into()
        }
        _ => error,
    }
}

/// Which of two errors tells more: that of a server which does not let us in, rather than that of a Sentinel which is not
/// there or knows no primary.
fn telling(known: Option<RedisError>, error: RedisError) -> RedisError {
    let tells = |error: &RedisError| match error::inner(error).kind() {
        ErrorKind::Io => 0,
        ErrorKind::MasterNameNotFoundBySentinel => 1,
        _ => 2,
    };
    match known {
        Some(known) if tells(&known) >= tells(&error) && tells(&known) > 0 => known,
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

    fn announced(epoch: u64, host: &str) -> Announcement {
        Announcement { epoch, primary: (host.to_owned(), 6379) }
    }

    #[test]
    fn a_server_is_left_once_that_a_sentinel_out_of_touch_has_named() {
        let (old, new, next) = (announced(5, "old"), announced(6, "new"), announced(7, "next"));
        let mut known = Known::default();
        known.connected(&new);
        assert!(!known.heard(&[&new], false));
        known.connected(&old);
        assert!(!known.heard(&[&old], false), "nobody else has answered");
        assert!(known.heard(&[&new], false));
        assert!(!known.heard(&[&new], false));
        // One that the watch has not heard of yet is no such server.
        known.connected(&next);
        assert!(!known.heard(&[&new], false));
        assert!(known.heard(&[&next], false));
        assert!(!known.heard(&[&next], false));
    }

    #[test]
    fn a_server_that_sentinels_call_by_different_names_is_not_left() {
        let (one, other) = (announced(6, "10.0.0.1"), announced(6, "redis.internal"));
        let mut known = Known::default();
        known.connected(&one);
        for _ in 0..3 {
            known.connected(&other);
            assert!(!known.heard(&[&other, &one], false));
        }
    }

    /// The next look came when the last one was 0.4 s ago.
    #[tokio::test]
    async fn announcement_is_followed_by_a_look() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let sentinel = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let info =
            redis::IntoConnectionInfo::into_connection_info(format!("redis://{}/", sentinel.local_addr().unwrap()));
        let settings = redis::RedisConnectionInfo::default().set_skip_set_lib_name();
        let client = Client::open(info.unwrap().set_redis_settings(settings)).unwrap();
        let open: Opener = Box::new(|_| Err(unknown_service()));
        let patience = Duration::from_secs(60);
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(patience));
        let _sentinels = Sentinels::new("orders", vec![client], open, config, patience);
        let (mut connection, _) = sentinel.accept().await.unwrap();
        let (mut looks, mut unread) = (Vec::new(), String::new());
        while looks.len() < 10 {
            let mut read = [0; 1_024];
            let length = connection.read(&mut read).await.unwrap();
            unread += &String::from_utf8_lossy(&read[..length]);
            // Each word on a line of its own, after its length.
            let words: Vec<&str> = unread.lines().skip(2).step_by(2).collect();
            let answer = match words[0] {
                "HELLO" => "%0\r\n".to_owned(),
                "SUBSCRIBE" => ANNOUNCEMENTS
                    .map(|name| format!(">3\r\n$9\r\nsubscribe\r\n${}\r\n{name}\r\n:1\r\n", name.len()))
                    .concat(),
                "SENTINEL" if words[1] == "MASTER" => {
                    looks.push(Instant::now());
                    "%1\r\n$12\r\nconfig-epoch\r\n$1\r\n1\r\n".to_owned()
                }
                "SENTINEL" => {
                    let others = ">3\r\n$7\r\nmessage\r\n$14\r\n+switch-master\r\n$8\r\npayments\r\n";
                    let ours = ">3\r\n$7\r\nmessage\r\n$14\r\n+switch-master\r\n$10\r\norders a b\r\n";
                    // Not of another service.
                    let event = if looks.len() % 2 == 0 { ours } else { others };
                    format!("*2\r\n$9\r\n127.0.0.1\r\n$1\r\n1\r\n{event}")
                }
                _ => "+OK\r\n".to_owned(),
            };
            unread.clear();
            connection.write_all(answer.as_bytes()).await.unwrap();
        }
        let pauses: Vec<_> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (others, ours): (Vec<_>, Vec<_>) =
            (pauses.iter().step_by(2).collect(), pauses.iter().skip(1).step_by(2).collect());
        assert!(ours.iter().all(|pause| **pause < WATCH), "{pauses:?}");
        assert!(others.iter().all(|pause| **pause >= WATCH), "{pauses:?}");
    }

    /// It was left without any connection: the client library refuses to hand on announcements where the protocol has none.
    #[tokio::test]
    async fn sentinel_without_hello_is_asked() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        let info = redis::IntoConnectionInfo::into_connection_info(url).unwrap();
        let settings = redis::RedisConnectionInfo::default().set_skip_set_lib_name();
        let client = Client::open(info.set_redis_settings(settings)).unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            // The one that is refused, and the one that is used.
            for _ in 0..2 {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut read = [0; 1_024];
                while let Ok(length @ 1..) = connection.read(&mut read).await {
                    let command = String::from_utf8_lossy(&read[..length]).into_owned();
                    let answer = if command.contains("HELLO") {
                        "-ERR unknown command 'HELLO', with args beginning with: '3'\r\n"
                    } else if command.contains("GET-MASTER-ADDR-BY-NAME") {
                        "*2\r\n$9\r\n127.0.0.1\r\n$1\r\n1\r\n"
                    } else {
                        "*2\r\n$12\r\nconfig-epoch\r\n$1\r\n7\r\n"
                    };
                    connection.write_all(answer.as_bytes()).await.unwrap();
                }
            }
        });
        let sentinel = Sentinel::new(client, &AsyncConnectionConfig::new(), &Arc::from("orders"), &Arc::default());
        let answer = timeout(Duration::from_secs(10), sentinel.ask("orders")).await.unwrap().unwrap();
        assert_eq!((answer.epoch, answer.primary), (7, ("127.0.0.1".to_owned(), 1)));
    }
}

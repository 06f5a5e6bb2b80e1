//! What replicas have to have: those that are written at the same time share a connection, and the WAIT that comes after them.
//!
//! Redis does nothing for a connection on which it waits for replicas, and says up to a tenth of a second late that they do not have it. What
//! was sent there meanwhile would be too late, so it goes over another connection, or is not sent at all.

use std::io;
use std::slice::from_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, RedisError, Value};
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::batch::batcher::{BatchConfig, Batcher, given_up};
use super::connection::connect::Connector;
use super::connection::handle::Connection;
use super::connection::pool::{Pool, PoolOptions, ServerState, no_connection};
use super::error::unsent;
use crate::lock::Replicas;

/// Nobody goes alone. With a second call those who come while one waits for replicas that are well need not wait for it.
const LIMITS: BatchConfig = BatchConfig {
    max_unbatched: 0,
    linger: Duration::ZERO,
    max_batch: 128,
    split: |_| 1,
    max_in_flight: |_| 2,
    full: 2,
};
/// So many numbers of replicas have connections of their own, the last one together with all that are larger.
const NUMBERS: usize = 4;
/// How many connections each of them has at the most, however many requests have.
const MAX_SEATS: u32 = 16;
/// By how much Redis may be late to say that replicas do not have what they are waited for with.
const LATE: Duration = Duration::from_millis(100);

/// Connections to one server for what replicas have to have, opened when they are needed.
#[derive(Clone)]
pub(crate) struct Replicated(Arc<Shared>);

struct Shared {
    connector: Connector,
    connections: u32,
    terms: PoolOptions,
    // One connection that is found dead, or cannot be opened, speaks for all.
    siblings: Arc<ServerState>,
    // By how many replicas it takes, so that those who want few do not wait behind those who want more than there are.
    meetings: [OnceLock<(Batcher<Pending>, Arc<Seats>)>; NUMBERS],
}

/// What became of a command.
pub(crate) enum Outcome {
    /// What the server says. As many replicas as it takes have what that grants, if it grants anything.
    Replied(Value),
    /// So few have what was granted; none if nothing was sent, since no connection was free in time of a server that answers.
    Insufficient(u32),
    /// It was granted, and it is not known who has it.
    Indeterminate(RedisError),
}

/// Somebody who has not asked yet.
struct Pending {
    command: Cmd,
    asking: bool,
    is_granted: fn(&Value) -> bool,
    count: u32,
    // How long a connection is waited for, and then replicas.
    within: Duration,
    // When there has to be a connection.
    until: Instant,
    reply: oneshot::Sender<Result<Outcome, RedisError>>,
}

impl Replicated {
    /// At most so many connections for each number of replicas.
    pub(crate) fn new(connector: Connector, connections: u32, terms: PoolOptions) -> Self {
        let connections = connections.min(MAX_SEATS);
        Self(Arc::new(Shared { connector, connections, terms, siblings: Arc::default(), meetings: Default::default() }))
    }

    /// Sends a command and, if `is_granted` says so of the answer, waits until so many replicas have what it has written.
    pub(crate) async fn exchange(
        &self,
        command: &Cmd,
        asking: bool,
        replicas: Replicas,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Outcome, RedisError> {
        let Replicas { count, within } = replicas;
        // The server has to answer before nobody listens any more.
        let within = within.min(self.0.terms.response / 2);
        let until = Instant::now() + within;
        let wish = |reply| Pending { command: command.clone(), asking, is_granted, count, within, until, reply };
        let (meeting, seats) = self.0.meeting(count);
        match meeting.submit(wish).await {
            Some(Ok(answer)) => answer,
            Some(Err(_)) => {
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the runtime of the connection has ended").into())
            }
            // So many wait that there is no turn in time.
            None => seats.refusal(within),
        }
    }
}

impl Shared {
    /// Where those meet who want so many replicas.
    fn meeting(&self, count: u32) -> &(Batcher<Pending>, Arc<Seats>) {
        let Self { connector, connections, terms, siblings, meetings } = self;
        let number = (count as usize).clamp(1, NUMBERS) - 1;
        meetings[number].get_or_init(|| {
            let seats = Arc::new(Seats::new(connector, *connections, terms, siblings));
            let taken = Arc::clone(&seats);
            let send = move |wishes, _| {
                let seats = Arc::clone(&taken);
                async move { go_together(seats, wishes).await.then(Instant::now) }
            };
            (Batcher::new(LIMITS, &terms.home, send), seats)
        })
    }
}

/// Connections, each for those alone who have taken it.
struct Seats {
    free: Mutex<Vec<Pool>>,
    places: Semaphore,
    // Since when somebody asks, if the server has said nothing to anybody since.
    silent_since: Mutex<Option<Instant>>,
}

struct DedicatedConnection<'a> {
    seats: &'a Seats,
    // Of one connection.
    pool: Pool,
    _place: SemaphorePermit<'a>,
}

impl Seats {
    fn new(connector: &Connector, connections: u32, terms: &PoolOptions, siblings: &Arc<ServerState>) -> Self {
        let seat = |_| Pool::lazy(connector.clone(), 1, terms.clone(), siblings);
        let free: Vec<_> = (0..connections).map(seat).collect();
        let places = Semaphore::new(free.len());
        Self { free: Mutex::new(free), places, silent_since: Mutex::default() }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Pool>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one that was given back last, so that no more are opened than are needed. `None` if there is none until then.
    async fn take(&self, until: Instant) -> Option<DedicatedConnection<'_>> {
        let place = timeout_at(until, self.places.acquire()).await.ok()?.ok()?;
        let pool = self.free().pop()?;
        Some(DedicatedConnection { seats: self, pool, _place: place })
    }

    fn silent_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the server is to answer from now on.
    fn ask(&self) {
        self.silent_since().get_or_insert_with(Instant::now);
    }

    /// Notes that it has.
    fn answered(&self) {
        *self.silent_since() = None;
    }

    /// What there is to say to somebody for whom nothing was sent, since no connection was free within that time. Where those that were not free
    /// had no answer either, it is the server that says nothing.
    fn refusal(&self, within: Duration) -> Result<Outcome, RedisError> {
        let is_silent = self.silent_since().is_some_and(|since| since.elapsed() >= within / 2);
        if is_silent { Err(unsent(no_connection(within))) } else { Ok(Outcome::Insufficient(0)) }
    }

    fn refuse(&self, wishes: Vec<Pending>) {
        for wish in wishes {
            let refusal = self.refusal(wish.within);
            wish.hears(refusal);
        }
    }
}

impl Drop for DedicatedConnection<'_> {
    fn drop(&mut self) {
        self.seats.free().push(self.pool.clone());
    }
}

/// Asks for all that have met, and tells each of them. Whether the server has answered, and replicas as well.
async fn go_together(seats: Arc<Seats>, wishes: Vec<Pending>) -> bool {
    let Some(until) = wishes.iter().map(|wish| wish.until).max() else { return false };
    let Some(seat) = seats.take(until).await else {
        seats.refuse(wishes);
        return false;
    };
    let now = Instant::now();
    let (mut wishes, late): (Vec<_>, Vec<_>) = wishes.into_iter().partition(|wish| now < wish.until);
    seats.refuse(late);
    seats.ask();
    let connected = tokio::select! {
        biased;
        connected = seat.pool.borrow() => connected,
        () = given_up(&mut wishes, |wish| &mut wish.reply) => return false,
    };
    let handle = match connected {
        Ok(handle) => handle,
        Err(error) => {
            let error = unsent(error);
            wishes.into_iter().for_each(|wish| wish.hears(Err(error.clone())));
            return false;
        }
    };
    // Who has given up need not get anything.
    let asking = wishes.into_iter().filter(|wish| !wish.reply.is_closed()).map(|wish| ask(handle.clone(), wish));
    let answers = join_all(asking).await;
    let is_answered = answers.iter().any(Option::is_some);
    if is_answered {
        seats.answered();
    }
    let mut granted: Vec<_> = answers.into_iter().flatten().flatten().collect();
    granted.retain(|(wish, _)| !wish.reply.is_closed());
    if granted.is_empty() {
        return is_answered;
    }
    wait(&seats, handle, granted).await
}

/// Asks for one of them, and tells those to whom nothing is granted. `None` if the server says nothing.
async fn ask(mut handle: Connection, mut wish: Pending) -> Option<Option<(Pending, Value)>> {
    let answer = tokio::select! {
        biased;
        answer = handle.send(&wish.command, wish.asking) => answer,
        () = given_up(from_mut(&mut wish.reply), |reply| reply) => return None,
    };
    match answer {
        Ok(value) if (wish.is_granted)(&value) => Some(Some((wish, value))),
        answer => {
            let is_answered = is_answer(&answer);
            wish.hears(answer.map(Outcome::Replied));
            is_answered.then_some(None)
        }
    }
}

/// Whether a server has said that.
fn is_answer<T>(answer: &Result<T, RedisError>) -> bool {
    answer.as_ref().map_or_else(|error| error.code().is_some(), |_| true)
}

/// Waits until as many replicas as it takes have what was granted over a connection, and tells each how many have. Whether those are enough.
async fn wait(seats: &Seats, mut handle: Connection, mut granted: Vec<(Pending, Value)>) -> bool {
    let count = granted.iter().map(|(wish, _)| wish.count).max().unwrap_or_default();
    let within = granted.iter().map(|(wish, _)| wish.patience()).max().unwrap_or_default();
    let mut command = redis::cmd("WAIT");
    // Zero would be for ever.
    command.arg(count).arg(within.as_millis().max(1) as u64);
    let due = Instant::now() + within + LATE;
    let given_up = async {
        given_up(&mut granted, |(wish, _)| &mut wish.reply).await;
        // Until then a server that is well does nothing for who comes next.
        sleep_until(due).await;
    };
    let answer = tokio::select! {
        biased;
        answer = handle.send(&command, false) => Some(answer),
        () = given_up => None,
    };
    if !answer.as_ref().is_some_and(is_answer) {
        seats.ask();
    }
    let Some(answer) = answer else { return false };
    let reached = match answer {
        Ok(Value::Int(reached)) => Ok(u32::try_from(reached).unwrap_or_default()),
        Ok(_) => Err((redis::ErrorKind::UnexpectedReturnType, "WAIT answers no number").into()),
        Err(error) => Err(error),
    };
    let are_enough = reached.as_ref().is_ok_and(|reached| *reached >= count);
    for (wish, value) in granted {
        let answer = match &reached {
            Ok(reached) if *reached >= wish.count => Outcome::Replied(value),
            Ok(reached) => Outcome::Insufficient(*reached),
            Err(error) => Outcome::Indeterminate(error.clone()),
        };
        wish.hears(Ok(answer));
    }
    are_enough
}

impl Pending {
    /// How long replicas are waited for from now on: what it took to come by a connection is not taken off.
    fn patience(&self) -> Duration {
        self.within.min((self.until + self.within).saturating_duration_since(Instant::now()))
    }

    fn hears(self, answer: Result<Outcome, RedisError>) {
        // Who has given up meanwhile is not interested.
        let _ = self.reply.send(answer);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;
    use crate::backend::redis::connection::runtime::RuntimeHandle;

    fn seats(port: u16) -> Seats {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
        let connector = Connector::Client(Box::new((client, config)));
        let long = Duration::from_secs(60);
        let terms = PoolOptions { connect: long, response: long, home: Arc::new(RuntimeHandle::here()) };
        Seats::new(&connector, 2, &terms, &Arc::default())
    }

    /// Lets everybody in, and says nothing but that all is well, until it is asked for something. Answers its port.
    async fn silent_server(connected: Arc<Semaphore>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                connected.add_permits(1);
                tokio::spawn(async move {
                    let mut read = [0; 1_024];
                    while let Ok(length) = client.read(&mut read).await
                        && length > 0
                    {
                        let text = String::from_utf8_lossy(&read[..length]);
                        let commands = if text.contains("WAIT") { 0 } else { text.matches('*').count() };
                        client.write_all("+OK\r\n".repeat(commands).as_bytes()).await.unwrap();
                    }
                });
            }
        });
        port
    }

    /// Each of them that was dead cost somebody a second.
    #[tokio::test]
    async fn a_connection_that_is_found_dead_speaks_for_the_others() {
        let connected = Arc::new(Semaphore::new(0));
        let seats = seats(silent_server(Arc::clone(&connected)).await);
        let until = Instant::now() + Duration::from_secs(60);
        let (one, other) = (seats.take(until).await.unwrap(), seats.take(until).await.unwrap());
        let mut dead = one.pool.borrow().await.unwrap();
        other.pool.borrow().await.unwrap();
        assert!(timeout(Duration::from_millis(1_100), dead.send(&redis::cmd("WAIT"), false)).await.is_err());
        assert_eq!(connected.available_permits(), 2);
        other.pool.borrow().await.unwrap();
        assert_eq!(connected.available_permits(), 3, "it may be as dead");
    }

    /// Each of them said so in the log.
    #[tokio::test]
    async fn a_connection_that_cannot_be_opened_speaks_for_the_others() {
        // There is nobody to connect to.
        let seats = seats(1);
        let until = Instant::now() + Duration::from_secs(60);
        let (one, other) = (seats.take(until).await.unwrap(), seats.take(until).await.unwrap());
        assert!(one.pool.borrow().await.is_err());
        assert!(other.pool.is_in_trouble());
    }
}

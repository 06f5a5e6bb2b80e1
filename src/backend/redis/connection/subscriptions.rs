//! The task that listens to one server: its subscriptions on one connection, and how it connects again.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::RedisError;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::pool::no_connection;
use super::pubsub::{Answer, Event, Listener, Refusal, Server};
use super::subscriber::Shared;

/// The pause after an attempt to connect that failed, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long a connection has to last after a confirmation in order to be of use: one that always ends at once is no better than none.
const OF_USE: Duration = Duration::from_secs(1);
/// How often the map of a cluster is doubted while a node lets nobody in.
const DOUBT: Duration = Duration::from_secs(1);
/// When channels are asked for again that the user may not listen to: somebody has to allow it first.
const REFUSED: Duration = Duration::from_secs(5);
/// How many channels are subscribed to at once.
const CHUNK: usize = 256;

/// What of the channels the server sends on one connection.
#[derive(Default)]
pub(crate) struct Subscriptions {
    pub(crate) confirmed: HashSet<Arc<str>>,
    // Those that the user may not listen to, and when they are asked for again.
    pub(crate) refused: Vec<Arc<str>>,
    pub(crate) again_at: Option<Instant>,
    // Since when any is confirmed.
    confirmed_at: Option<Instant>,
    // Whether the log was told that there is no connection of use.
    is_deaf: bool,
}

/// Listens to a server for as long as it has any of the channels.
pub(crate) async fn run(shared: Arc<Shared>, server: Server) {
    let (mut pause, mut is_deaf) = (Duration::ZERO, false);
    loop {
        let mut subscriptions = Subscriptions { is_deaf, ..Subscriptions::default() };
        let failure = match open(&shared, &server).await {
            Ok(listener) => match listen(&shared, &server, listener, &mut subscriptions).await {
                // Whoever listens from now on has a task of their own already.
                Ok(()) => return,
                Err(error) => error,
            },
            Err(error) => error,
        };
        is_deaf = subscriptions.is_deaf;
        let name = shared.source.name(&server);
        if subscriptions.is_of_use() {
            pause = Duration::ZERO;
            tracing::debug!(server = name, error = %failure, "the connection with the subscriptions is gone");
        } else {
            shared.meters.failed();
            if !std::mem::replace(&mut is_deaf, true) {
                tracing::warn!(server = name, error = %failure, "cannot subscribe to redis; waiters and workers poll meanwhile");
            }
        }
        shared.start_again(&server);
        drop(shared.take_unused(&server, Instant::now()));
        if shared.is_idle(&server) {
            return;
        }
        // Another node may have taken over.
        shared.source.doubt();
        pause = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        sleep(pause).await;
    }
}

/// Connects to a server, in the time that there is.
async fn open(shared: &Arc<Shared>, server: &Server) -> Result<Listener, RedisError> {
    let (told, from) = (Arc::downgrade(shared), server.clone());
    let tell = move |news: Event<'_>| {
        if let Some(shared) = told.upgrade() {
            shared.hear(&from, news);
        }
    };
    let patience = shared.source.patience();
    let mut opened = pin!(timeout(patience, Listener::open(&shared.source, server, tell)));
    loop {
        match timeout(DOUBT, &mut opened).await {
            Ok(outcome) => return outcome.unwrap_or_else(|_| Err(no_connection(patience))),
            // Another node may take over meanwhile.
            Err(_) => shared.source.doubt(),
        }
    }
}

/// Listens until the connection breaks or nobody is interested any more.
async fn listen(
    shared: &Shared,
    server: &Server,
    mut listener: Listener,
    subscriptions: &mut Subscriptions,
) -> Result<(), RedisError> {
    shared.start_again(server);
    let work = shared.work(server);
    let period = shared.source.ping_period();
    let mut ping_at = Instant::now() + period;
    loop {
        let next = adapt(shared, server, &mut listener, subscriptions).await?;
        if subscriptions.confirmed.is_empty() && shared.is_idle(server) {
            return Ok(());
        }
        let (again_at, heard_at) = (subscriptions.again_at, subscriptions.heard_again(shared, server));
        tokio::select! {
            error = listener.ended() => return Err(error),
            () = work.notified() => {}
            () = sleep_until([next, again_at, heard_at].into_iter().flatten().fold(ping_at, Instant::min)) => {}
        }
        if Instant::now() >= ping_at {
            ping_at = Instant::now() + period;
            timeout(shared.source.answer_patience(), listener.ping()).await.map_err(|_| silence())??;
        }
    }
}

/// Subscribes to what is new and leaves what nobody wants, and says when to look again.
pub(crate) async fn adapt(
    shared: &Shared,
    server: &Server,
    listener: &mut Listener,
    subscriptions: &mut Subscriptions,
) -> Result<Option<Instant>, RedisError> {
    let (now, patience) = (Instant::now(), shared.source.answer_patience());
    let (unused, next) = shared.take_unused(server, now);
    let unused: Vec<_> = unused.into_iter().filter(|name| subscriptions.confirmed.remove(name)).collect();
    for names in unused.chunks(CHUNK) {
        timeout(patience, listener.unsubscribe(names)).await.map_err(|_| silence())??;
    }
    let is_due = subscriptions.again_at.take_if(|at| *at <= now).is_some();
    let again = if is_due { std::mem::take(&mut subscriptions.refused) } else { Vec::new() };
    let (added, is_again) = shared.take_added(server, again);
    let mut missing = None;
    for names in added.chunks(CHUNK) {
        let answer = timeout(patience, listener.subscribe(names)).await.map_err(|_| silence())??;
        let Answer { refusal, elsewhere } = answer;
        let refused = refusal.as_ref().map(|refusal| &*refusal.channels).unwrap_or_default();
        let is_confirmed = |name: &&Arc<str>| !refused.contains(name) && !elsewhere.contains(name);
        let names: Vec<_> = names.iter().filter(is_confirmed).cloned().collect();
        subscriptions.confirmed(shared, server, &names);
        if !elsewhere.is_empty() {
            shared.misplaced(server, &elsewhere);
        }
        if let Some(Refusal { channels, missing: right }) = refusal {
            subscriptions.refused.extend(channels);
            missing = Some(right);
        }
    }
    match missing {
        Some(right) => {
            subscriptions.again_at.get_or_insert(now + REFUSED);
            shared.refused(right);
        }
        None if !added.is_empty() => shared.allowed(is_again),
        None => {}
    }
    Ok(next)
}

impl Subscriptions {
    fn confirmed(&mut self, shared: &Shared, server: &Server, names: &[Arc<str>]) {
        if names.is_empty() {
            return;
        }
        self.confirmed_at.get_or_insert_with(Instant::now);
        self.confirmed.extend(names.iter().cloned());
        shared.confirmed(server, names);
    }

    /// Whether the connection has lasted.
    fn is_of_use(&self) -> bool {
        self.confirmed_at.is_some_and(|at| at.elapsed() >= OF_USE)
    }

    /// Tells the log once the connection has lasted, if it was told that there was none, and says when to look again.
    fn heard_again(&mut self, shared: &Shared, server: &Server) -> Option<Instant> {
        if !self.is_deaf {
            return None;
        }
        if self.is_of_use() {
            self.is_deaf = false;
            tracing::info!(server = shared.source.name(server), "subscribed to redis again");
            return None;
        }
        self.confirmed_at.map(|at| at + OF_USE)
    }
}

fn silence() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

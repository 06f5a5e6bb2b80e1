//! One connection that listens for all who wait in this process.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::RedisError;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::home::Home;
use super::listener::{Listener as Ear, News, Refusal, Right, Source};
use crate::lock::{Token, Wakeups};

/// How long whoever subscribes waits for that to be confirmed, before going on to look now and then.
const CONFIRMATION: Duration = Duration::from_millis(200);
/// How long a channel is listened to when nobody waits there any more: a lock that was wanted is wanted again soon.
const LINGER: Duration = Duration::from_secs(2);
/// How often a connection on which nothing comes is asked whether it is alive.
const PING: Duration = Duration::from_secs(5);
/// The pause after an attempt to connect that failed, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// When channels are asked for again that the user may not listen to: somebody has to allow it first.
const REFUSED: Duration = Duration::from_secs(5);
/// How many channels one command subscribes to.
const CHUNK: usize = 256;

/// Subscriptions of this process to one server, on a connection that is there while somebody listens.
pub(super) struct Subscriber {
    home: Arc<Home>,
    shared: Arc<Shared>,
}

struct Shared {
    source: Source,
    state: Mutex<State>,
    work: Notify,
}

#[derive(Default)]
struct State {
    channels: HashMap<Arc<str>, Channel>,
    // Channels that are not subscribed to yet.
    added: Vec<Arc<str>>,
    // Channels that nobody listened to any more at that time, oldest first.
    unused: VecDeque<(Instant, Arc<str>)>,
    // What the user was last found not to be allowed.
    missing: Option<Right>,
    task: Option<AbortHandle>,
}

struct Channel {
    listeners: usize,
    is_confirmed: watch::Sender<bool>,
    messages: watch::Sender<()>,
    // Of these, those that were sent. Not that some may have been missed.
    sent: watch::Sender<()>,
    // For those who stand in line, and are told when it is their turn.
    turns: HashMap<Token, watch::Sender<()>>,
}

/// What wakes somebody who listens.
#[derive(Clone, Copy)]
pub(super) enum Interest {
    /// Each message that is for all, and that some may have been missed.
    Changes,
    /// The same of messages for a certain token, and of those for all.
    Turn(Token),
    /// Each message that is for all, and nothing else.
    Messages,
}

/// Somebody who listens. The channel is given up some time after the last one is dropped.
struct Listener {
    shared: Arc<Shared>,
    channel: Arc<str>,
    interest: Interest,
}

impl Subscriber {
    pub(super) fn new(source: Source, home: Arc<Home>) -> Self {
        let (state, work) = (Mutex::default(), Notify::new());
        Self { home, shared: Arc::new(Shared { source, state, work }) }
    }

    /// Wake-ups for messages on a channel. They may be missed whenever the connection is made again. Ready when the
    /// server has confirmed that it sends them, or when that takes too long; then they may have been missed until it has.
    pub(super) async fn subscribe(&self, channel: String, interest: Interest) -> Wakeups {
        if !self.shared.source.can_subscribe() {
            return Wakeups::none();
        }
        let (listener, mut is_confirmed, mut messages) = self.listen(channel.into(), interest);
        if timeout(CONFIRMATION, is_confirmed.wait_for(|is_confirmed| *is_confirmed)).await.is_ok() {
            messages.mark_unchanged();
        }
        Wakeups::new(messages, Arc::new(listener))
    }

    /// Whether the server counts this process among those who listen.
    pub(super) fn listens_to(&self, channel: &str) -> bool {
        self.shared.state().channels.get(channel).is_some_and(|channel| *channel.is_confirmed.borrow())
    }

    fn listen(&self, name: Arc<str>, interest: Interest) -> (Listener, watch::Receiver<bool>, watch::Receiver<()>) {
        let mut state = self.shared.state();
        if !state.channels.contains_key(&name) {
            let channel = Channel {
                listeners: 0,
                is_confirmed: watch::Sender::new(false),
                messages: watch::Sender::new(()),
                sent: watch::Sender::new(()),
                turns: HashMap::new(),
            };
            state.channels.insert(Arc::clone(&name), channel);
            state.added.push(Arc::clone(&name));
            self.shared.work.notify_one();
        }
        let channel = state.channels.get_mut(&name).expect("it was put there if it was not");
        channel.listeners += 1;
        let messages = match interest {
            Interest::Changes => &channel.messages,
            Interest::Messages => &channel.sent,
            Interest::Turn(token) => channel.turns.entry(token).or_insert_with(|| watch::Sender::new(())),
        };
        let receivers = (channel.is_confirmed.subscribe(), messages.subscribe());
        // The task ends when nobody listens, and with its runtime.
        if state.task.as_ref().is_none_or(AbortHandle::is_finished) {
            state.task = Some(self.home.spawn(run(Arc::clone(&self.shared))));
        }
        (Listener { shared: Arc::clone(&self.shared), channel: name, interest }, receivers.0, receivers.1)
    }
}

impl Channel {
    fn tell_all(&self) {
        self.messages.send_replace(());
        for turn in self.turns.values() {
            turn.send_replace(());
        }
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if let Some(task) = self.shared.state().task.take() {
            task.abort();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let Some(channel) = state.channels.get_mut(&self.channel) else { return };
        channel.listeners -= 1;
        if let Interest::Turn(token) = &self.interest {
            channel.turns.remove(token);
        }
        if channel.listeners == 0 {
            let name = Arc::clone(&self.channel);
            state.unused.push_back((Instant::now(), name));
            if state.unused.len() == 1 {
                // The task has to look at the time from now on.
                self.shared.work.notify_one();
            }
        }
    }
}

impl Shared {
    /// Nothing panics halfway in here, so what a poisoned lock guards is whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nobody listens any more. The task ends then, and the next one who listens starts another.
    fn is_over(&self) -> bool {
        let mut state = self.state();
        if !state.channels.is_empty() {
            return false;
        }
        state.added.clear();
        state.unused.clear();
        state.task = None;
        true
    }

    /// All channels that are listened to, none of which is confirmed any more.
    fn start_again(&self) {
        let mut state = self.state();
        let state = &mut *state;
        state.added = state.channels.keys().cloned().collect();
        for channel in state.channels.values() {
            channel.is_confirmed.send_replace(false);
        }
    }

    fn confirmed(&self, channels: &[Arc<str>]) {
        let state = self.state();
        for channel in channels.iter().filter_map(|name| state.channels.get(name)) {
            // What came before this was missed.
            channel.tell_all();
            channel.is_confirmed.send_replace(true);
        }
    }

    fn hear(&self, news: News<'_>) {
        let mut state = self.state();
        match news {
            News::Over(name) => {
                let Some((name, channel)) = state.channels.get_key_value(name) else { return };
                let name = Arc::clone(name);
                channel.is_confirmed.send_replace(false);
                state.added.push(name);
                self.work.notify_one();
            }
            News::Message(channel, whose) => {
                let Some(channel) = state.channels.get(channel) else { return };
                match whose {
                    None => {
                        channel.tell_all();
                        channel.sent.send_replace(());
                    }
                    Some(token) => {
                        if let Some(turn) = channel.turns.get(&token) {
                            turn.send_replace(());
                        }
                    }
                }
            }
            News::New(channel) => drop(state.channels.get(channel).map(Channel::tell_all)),
            News::MaybeMissed => state.channels.values().for_each(Channel::tell_all),
        }
    }

    /// Channels to subscribe to, new ones and those that were refused before, of these whichever is still listened to; and whether any was refused before.
    fn take_added(&self, mut again: Vec<Arc<str>>) -> (Vec<Arc<str>>, bool) {
        let mut state = self.state();
        let mut added = std::mem::take(&mut state.added);
        for names in [&mut added, &mut again] {
            names.retain(|name| state.channels.contains_key(name));
        }
        let is_again = !again.is_empty();
        added.append(&mut again);
        (added, is_again)
    }

    fn refused(&self, missing: Right) {
        if self.state().missing.replace(missing) == Some(missing) {
            return;
        }
        let missing = match missing {
            Right::Command(name) => format!("+{name}"),
            Right::Channels => "&<prefix>:2:*".to_owned(),
        };
        tracing::warn!(
            missing,
            "the redis user may not listen for those who wait: workers of queues look every five seconds instead, all others once a second"
        );
    }

    /// Nothing was refused of what was asked for, with or without channels that were refused before.
    fn allowed(&self, again: bool) {
        let mut state = self.state();
        if again || matches!(state.missing, Some(Right::Command(_))) {
            state.missing = None;
        }
    }

    /// Takes out the channels that nobody has listened to for a while, and says when to look again.
    fn take_unused(&self, now: Instant) -> (Vec<Arc<str>>, Option<Instant>) {
        let mut state = self.state();
        let mut unused = Vec::new();
        while let Some((since, _)) = state.unused.front() {
            if *since + LINGER > now {
                return (unused, Some(*since + LINGER));
            }
            let Some((_, name)) = state.unused.pop_front() else { break };
            if state.channels.get(&name).is_some_and(|channel| channel.listeners == 0) {
                state.channels.remove(&name);
                unused.push(name);
            }
        }
        (unused, None)
    }
}

/// What of the channels the server sends on one connection.
#[derive(Default)]
struct Subscriptions {
    confirmed: HashSet<Arc<str>>,
    // Those that the user may not listen to, and when they are asked for again.
    refused: Vec<Arc<str>>,
    again_at: Option<Instant>,
    // Whether any was confirmed.
    is_of_use: bool,
}

async fn run(shared: Arc<Shared>) {
    let mut pause = Duration::ZERO;
    loop {
        let told = Arc::downgrade(&shared);
        let tell = move |news: News<'_>| {
            if let Some(shared) = told.upgrade() {
                shared.hear(news);
            }
        };
        let connection = timeout(shared.source.patience(), Ear::open(&shared.source, tell)).await;
        match connection {
            Ok(Ok(connection)) => {
                let mut subscriptions = Subscriptions::default();
                match listen(&shared, connection, &mut subscriptions).await {
                    // Whoever listens from now on has a task of their own already.
                    Ok(()) => return,
                    Err(error) => tracing::debug!(%error, "the connection that listens for those who wait is gone"),
                }
                if subscriptions.is_of_use {
                    pause = Duration::ZERO;
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "cannot listen for those who wait"),
            Err(_) => tracing::debug!("cannot listen for those who wait: no connection in time"),
        }
        shared.start_again();
        drop(shared.take_unused(Instant::now()));
        if shared.is_over() {
            return;
        }
        pause = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        sleep(pause).await;
    }
}

/// Listens until the connection breaks or nobody is interested any more.
async fn listen(shared: &Shared, mut ear: Ear, subscriptions: &mut Subscriptions) -> Result<(), RedisError> {
    shared.start_again();
    let mut ping_at = Instant::now() + PING;
    loop {
        let next = adapt(shared, &mut ear, subscriptions).await?;
        if subscriptions.confirmed.is_empty() && shared.is_over() {
            return Ok(());
        }
        let again_at = subscriptions.again_at;
        tokio::select! {
            error = ear.ended() => return Err(error),
            () = shared.work.notified() => {}
            () = sleep_until([next, again_at].into_iter().flatten().fold(ping_at, Instant::min)) => {}
        }
        if Instant::now() >= ping_at {
            ping_at = Instant::now() + PING;
            timeout(shared.source.answer_patience(), ear.ping()).await.map_err(|_| silence())??;
        }
    }
}

/// Subscribes to what is new and leaves what nobody wants, and says when to look again.
async fn adapt(
    shared: &Shared,
    ear: &mut Ear,
    subscriptions: &mut Subscriptions,
) -> Result<Option<Instant>, RedisError> {
    let (now, patience) = (Instant::now(), shared.source.answer_patience());
    let (unused, next) = shared.take_unused(now);
    let unused: Vec<_> = unused.into_iter().filter(|name| subscriptions.confirmed.remove(name)).collect();
    for names in unused.chunks(CHUNK) {
        timeout(patience, ear.unsubscribe(names)).await.map_err(|_| silence())??;
    }
    let is_due = subscriptions.again_at.take_if(|at| *at <= now).is_some();
    let again = if is_due { std::mem::take(&mut subscriptions.refused) } else { Vec::new() };
    let (added, is_again) = shared.take_added(again);
    let mut missing = None;
    for names in added.chunks(CHUNK) {
        let refusal = timeout(patience, ear.subscribe(names)).await.map_err(|_| silence())??;
        let Some(refusal) = refusal else {
            subscriptions.confirmed(shared, names);
            continue;
        };
        let is_confirmed = |name: &&Arc<str>| !refusal.channels.contains(name);
        let names: Vec<_> = names.iter().filter(is_confirmed).cloned().collect();
        subscriptions.confirmed(shared, &names);
        let Refusal { channels, missing: right } = refusal;
        subscriptions.refused.extend(channels);
        missing = Some(right);
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
    fn confirmed(&mut self, shared: &Shared, names: &[Arc<str>]) {
        self.is_of_use |= !names.is_empty();
        self.confirmed.extend(names.iter().cloned());
        shared.confirmed(names);
    }
}

fn silence() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

#[cfg(test)]
mod tests {
    use redis::{AsyncConnectionConfig, Client};

    use super::super::connector::Connector;
    use super::super::differential::server::RedisServer;
    use super::*;

    /// A channel that was refused, and that nobody listens to any more when it is due to be asked for again, was taken for one that is allowed if another
    /// channel was allowed at that moment: the next refusal was a warning once more.
    #[tokio::test]
    async fn what_is_still_refused_is_not_forgotten_when_something_else_is_allowed() {
        let server = RedisServer::start();
        server.query::<()>("ACL SETUSER half on >secret ~* resetchannels &lock:* +@all");
        let client = Client::open(server.url().replace("://", "://half:secret@")).unwrap();
        let connector = Connector::Client(Box::new((client, AsyncConnectionConfig::new())));
        let patience = Duration::from_secs(10);
        let source = Source::One { connector, connect_timeout: patience, response_timeout: patience };
        let mut ear = Ear::open(&source, |_| {}).await.unwrap();
        let subscriber = Subscriber::new(source, Arc::new(Home::here()));
        let shared = &subscriber.shared;
        // What it would do is done here.
        shared.state().task = Some(subscriber.home.spawn(std::future::pending()));
        let missing = || shared.state().missing;
        let mut subscriptions = Subscriptions::default();

        let gone = subscriber.listen("operation:a".into(), Interest::Changes);
        adapt(shared, &mut ear, &mut subscriptions).await.unwrap();
        assert_eq!(missing(), Some(Right::Channels));
        drop(gone);
        let (unused, _) = shared.take_unused(Instant::now() + LINGER);
        assert_eq!(unused.len(), 1);

        let _lock = subscriber.listen("lock:a".into(), Interest::Changes);
        subscriptions.again_at = Some(Instant::now());
        adapt(shared, &mut ear, &mut subscriptions).await.unwrap();
        assert!(subscriber.listens_to("lock:a"));
        assert_eq!(missing(), Some(Right::Channels));

        // Until somebody allows what is listened to.
        let _wanted = subscriber.listen("operation:b".into(), Interest::Changes);
        adapt(shared, &mut ear, &mut subscriptions).await.unwrap();
        assert_eq!(missing(), Some(Right::Channels));
        server.query::<()>("ACL SETUSER half &operation:*");
        subscriptions.again_at = Some(Instant::now());
        adapt(shared, &mut ear, &mut subscriptions).await.unwrap();
        assert!(subscriber.listens_to("operation:b"));
        assert_eq!(missing(), None);
    }
}

//! The channels that this process subscribes to, and which server has each of them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::pubsub::{Event, Permission, Server, Source};
use super::runtime::RuntimeHandle;
use super::subscriptions::run;
use crate::backend::redis::metrics::Meters;
use crate::lock::{Notifications, Token};

/// How long whoever subscribes waits for that to be confirmed, before going on to look now and then.
const CONFIRMATION: Duration = Duration::from_millis(200);
/// How long a channel is listened to when nobody waits there any more: a lock that was wanted is wanted again soon.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
/// How long channels of a cluster that no node is known to have wait for the map to be read, before it is asked for again.
const STRAY: Duration = Duration::from_millis(100);
/// How long the map is not read anew at the most while it goes on to lead to nodes that refuse the channels.
const LONGEST_STRAY: Duration = Duration::from_millis(500);

/// Subscriptions of this process, on one connection to each server that has a channel in use.
pub(crate) struct Subscriber {
    // Where the tasks are.
    _home: Arc<RuntimeHandle>,
    shared: Arc<Shared>,
}

/// The state that the tasks of a subscriber share with its listeners.
pub(crate) struct Shared {
    pub(crate) source: Source,
    pub(crate) meters: Meters,
    home: Weak<RuntimeHandle>,
    state: Mutex<State>,
    // Wakes up the router: a channel has no server, or a link has ended.
    strays: Notify,
}

#[derive(Default)]
struct State {
    channels: HashMap<Arc<str>, Channel>,
    // One for each server that has any of the channels.
    links: HashMap<Server, Link>,
    // What the user was last found not to be allowed.
    missing: Option<Permission>,
    // On a cluster, gives channels to the nodes that have them.
    router: Option<AbortHandle>,
}

struct Channel {
    // The server that has it. None while it is not known which node of a cluster that is.
    server: Option<Server>,
    // The one that refused it last, although the map says that it has it.
    refused_by: Option<Server>,
    listeners: usize,
    is_confirmed: watch::Sender<bool>,
    messages: watch::Sender<()>,
    // Of these, those that were sent. Not that some may have been missed.
    sent: watch::Sender<()>,
    // For those who stand in line, and are told when it is their turn.
    turns: HashMap<Token, watch::Sender<()>>,
}

/// The work of the task that listens to one server.
struct Link {
    // Channels that are not subscribed to yet.
    added: Vec<Arc<str>>,
    // Channels that have moved to another server.
    left: Vec<Arc<str>>,
    // Channels that nobody listened to any more at that time, oldest first.
    unused: VecDeque<(Instant, Arc<str>)>,
    work: Arc<Notify>,
    task: AbortHandle,
}

/// What wakes somebody who listens.
#[derive(Clone, Copy)]
pub(crate) enum Interest {
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
    pub(crate) fn new(source: Source, home: Arc<RuntimeHandle>) -> Self {
        let (state, strays, meters) = (Mutex::default(), Notify::new(), Meters::new());
        let shared = Arc::new(Shared { source, meters, home: Arc::downgrade(&home), state, strays });
        Self { _home: home, shared }
    }

    /// Wake-ups for messages on a channel. They may be missed whenever a connection is made again; there is one when it has been. Ready when the
    /// server has confirmed that it sends them, or when that takes too long; then they may have been missed until it has.
    pub(crate) async fn subscribe(&self, channel: String, interest: Interest) -> Notifications {
        if !self.shared.source.can_subscribe() {
            return Notifications::none();
        }
        let (listener, mut is_confirmed, mut messages) = self.listen(channel.into(), interest);
        if timeout(CONFIRMATION, is_confirmed.wait_for(|is_confirmed| *is_confirmed)).await.is_ok() {
            messages.mark_unchanged();
        }
        Notifications::new(messages, Arc::new(listener))
    }

    /// Whether the server counts this process among those who listen.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        self.shared.state().channels.get(channel).is_some_and(|channel| *channel.is_confirmed.borrow())
    }

    fn listen(&self, name: Arc<str>, interest: Interest) -> (Listener, watch::Receiver<bool>, watch::Receiver<()>) {
        let shared = &self.shared;
        let mut state = shared.state();
        shared.revive(&mut state);
        let is_new = !state.channels.contains_key(&name);
        let channel = state.channels.entry(Arc::clone(&name)).or_insert_with(Channel::new);
        channel.listeners += 1;
        let messages = match interest {
            Interest::Changes => &channel.messages,
            Interest::Messages => &channel.sent,
            Interest::Turn(token) => channel.turns.entry(token).or_insert_with(|| watch::Sender::new(())),
        };
        let receivers = (channel.is_confirmed.subscribe(), messages.subscribe());
        if is_new {
            shared.assign(&mut state, &name);
        }
        (Listener { shared: Arc::clone(shared), channel: name, interest }, receivers.0, receivers.1)
    }
}

impl Channel {
    fn new() -> Self {
        Self {
            server: None,
            refused_by: None,
            listeners: 0,
            is_confirmed: watch::Sender::new(false),
            messages: watch::Sender::new(()),
            sent: watch::Sender::new(()),
            turns: HashMap::new(),
        }
    }

    fn tell_all(&self) {
        self.messages.send_replace(());
        for turn in self.turns.values() {
            turn.send_replace(());
        }
    }

    fn is_at(&self, server: &Server) -> bool {
        self.server.as_ref() == Some(server)
    }
}

impl State {
    /// Takes a channel from a server, and has the server's task forget it.
    fn misplace(&mut self, server: &Server, name: &Arc<str>) -> Option<&mut Channel> {
        let channel = self.channels.get_mut(name).filter(|channel| channel.is_at(server))?;
        channel.server = None;
        channel.is_confirmed.send_replace(false);
        if let Some(link) = self.links.get_mut(server) {
            link.left.push(Arc::clone(name));
            link.work.notify_one();
        }
        Some(channel)
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.router.take().iter().chain(state.links.values().map(|link| &link.task)).for_each(AbortHandle::abort);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let State { channels, links, .. } = &mut *state;
        let Some(channel) = channels.get_mut(&self.channel) else { return };
        channel.listeners -= 1;
        if let Interest::Turn(token) = &self.interest {
            channel.turns.remove(token);
        }
        if channel.listeners > 0 {
            return;
        }
        let Some(link) = channel.server.as_ref().and_then(|server| links.get_mut(server)) else {
            // It has no subscription that would have to end.
            channels.remove(&self.channel);
            return;
        };
        link.unused.push_back((Instant::now(), Arc::clone(&self.channel)));
        if link.unused.len() == 1 {
            // The task has to look at the time from now on.
            link.work.notify_one();
        }
    }
}

/// Which server has which channel.
impl Shared {
    /// Nothing panics halfway in here, so what a poisoned lock guards is whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        match self.home.upgrade() {
            Some(home) => home.spawn(task),
            None => tokio::spawn(task).abort_handle(),
        }
    }

    /// Starts the tasks again that have ended with their runtime.
    fn revive(self: &Arc<Self>, state: &mut State) {
        for (server, link) in &mut state.links {
            if link.task.is_finished() {
                link.task = self.spawn(run(Arc::clone(self), server.clone()));
            }
        }
        if let Some(reads) = self.source.reads()
            && state.router.as_ref().is_none_or(AbortHandle::is_finished)
        {
            state.router = Some(self.spawn(route(Arc::clone(self), reads)));
        }
    }

    /// Gives a channel to the task of the server that has it. Whether that is the one again that has refused it.
    fn assign(self: &Arc<Self>, state: &mut State, name: &Arc<str>) -> bool {
        let State { channels, links, .. } = state;
        let Some(channel) = channels.get_mut(name) else { return false };
        let Some(server) = self.source.server_of(name) else {
            if channel.server.is_none() {
                self.strays.notify_one();
            }
            return false;
        };
        if channel.is_at(&server) {
            return false;
        }
        // Kept for the next refusal.
        channel.refused_by.take_if(|refusing| *refusing != server);
        let is_again = channel.refused_by.is_some();
        channel.is_confirmed.send_replace(false);
        if let Some(link) = channel.server.replace(server.clone()).and_then(|old| links.get_mut(&old)) {
            link.left.push(Arc::clone(name));
            link.work.notify_one();
        }
        let link = links.entry(server).or_insert_with_key(|server| Link {
            added: Vec::new(),
            left: Vec::new(),
            unused: VecDeque::new(),
            work: Arc::default(),
            task: self.spawn(run(Arc::clone(self), server.clone())),
        });
        link.added.push(Arc::clone(name));
        if channel.listeners == 0 {
            link.unused.push_back((Instant::now(), Arc::clone(name)));
        }
        link.work.notify_one();
        is_again
    }

    /// The same for all channels, after the map was read. One that goes to a server that has refused it.
    fn assign_all(self: &Arc<Self>) -> Option<Arc<str>> {
        let mut state = self.state();
        let mut names: Vec<_> = state.channels.keys().cloned().collect();
        names.retain(|name| self.assign(&mut state, name));
        names.pop()
    }

    /// Whether a server has refused a channel that no other one has been found for.
    fn has_refused(&self) -> bool {
        self.state().channels.values().any(|channel| channel.refused_by.is_some())
    }

    /// Notes that a server has ended the subscription to a channel.
    fn ended(&self, server: &Server, name: &Arc<str>) {
        self.state().misplace(server, name);
        self.strays.notify_one();
    }

    /// Notes that a server has refused channels that the map says it has.
    pub(crate) fn misplaced(&self, server: &Server, names: &[Arc<str>]) {
        self.meters.failed();
        let mut state = self.state();
        for name in names {
            if let Some(channel) = state.misplace(server, name) {
                channel.refused_by = Some(server.clone());
            }
        }
        self.strays.notify_one();
    }

    /// Whether any channel has no server.
    fn has_strays(&self) -> bool {
        self.state().channels.values().any(|channel| channel.server.is_none())
    }

    /// A channel that no node of the cluster serves.
    fn unserved(&self) -> Option<Arc<str>> {
        let state = self.state();
        let mut strays = state.channels.iter().filter(|(_, channel)| channel.server.is_none());
        strays.find(|(name, _)| self.source.server_of(name).is_none()).map(|(name, _)| Arc::clone(name))
    }

    /// Whether there are no channels any more. The router ends then, and the next listener starts another.
    fn is_over(&self) -> bool {
        let mut state = self.state();
        let is_over = state.channels.is_empty();
        if is_over {
            state.router = None;
        }
        is_over
    }
}

/// What is known of nodes that refuse channels which the map says they have, one map after the other.
#[derive(Default)]
struct Refusals {
    pause: Duration,
    is_told: bool,
}

impl Refusals {
    /// How long to wait after one more of them.
    fn pause(&mut self, channel: &str) -> Duration {
        self.pause = (self.pause * 2).clamp(STRAY, LONGEST_STRAY);
        // While a slot moves, nodes may disagree for a moment.
        if self.pause == LONGEST_STRAY && !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!(
                channel,
                "cannot subscribe to redis, the node of the slot refuses; waiters and workers poll meanwhile"
            );
        }
        self.pause
    }
}

/// Gives channels to the nodes of a cluster that have them, each time that the map was read.
async fn route(shared: Arc<Shared>, mut reads: watch::Receiver<()>) {
    let (mut is_unserved, mut refusals) = (false, Refusals::default());
    while !shared.is_over() {
        let has_strays = shared.has_strays();
        if has_strays {
            shared.source.doubt();
        }
        tokio::select! {
            read = reads.changed() => if read.is_err() { return },
            // The current map led to a node that does not have the channel. Wait for the next one.
            () = shared.strays.notified() => continue,
            () = sleep(STRAY), if has_strays => {}
        }
        let again = shared.assign_all();
        if !shared.has_refused() {
            refusals = Refusals::default();
        }
        if let Some(channel) = again {
            sleep(refusals.pause(&channel)).await;
        }
        let unserved = shared.unserved();
        let was_unserved = std::mem::replace(&mut is_unserved, unserved.is_some());
        let Some(channel) = unserved else { continue };
        shared.meters.failed();
        if !was_unserved {
            tracing::warn!(%channel, "cannot subscribe to redis, no node serves the slot; waiters and workers poll meanwhile");
        }
    }
}

/// The exchange with the task that listens to one server.
impl Shared {
    /// Whether a server has no channel any more. Its task ends then, and the next listener there starts another.
    pub(crate) fn is_idle(&self, server: &Server) -> bool {
        let mut state = self.state();
        if state.channels.values().any(|channel| channel.is_at(server)) {
            return false;
        }
        state.links.remove(server);
        // That may have been the last one.
        self.strays.notify_one();
        true
    }

    /// Wakes up the task of a server when there is something to do.
    pub(crate) fn work(&self, server: &Server) -> Arc<Notify> {
        self.state().links.get(server).map(|link| Arc::clone(&link.work)).unwrap_or_default()
    }

    /// All channels of a server, none of which is confirmed any more.
    pub(crate) fn start_again(&self, server: &Server) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let Some(link) = links.get_mut(server) else { return };
        link.left.clear();
        link.added.clear();
        for (name, channel) in channels.iter().filter(|(_, channel)| channel.is_at(server)) {
            link.added.push(Arc::clone(name));
            channel.is_confirmed.send_replace(false);
        }
    }

    /// Notes that a server sends what comes on channels from now on.
    pub(crate) fn confirmed(&self, server: &Server, names: &[Arc<str>]) {
        let mut state = self.state();
        for name in names {
            let Some(channel) = state.channels.get_mut(name).filter(|channel| channel.is_at(server)) else { continue };
            channel.refused_by = None;
            // What came before this was missed.
            channel.tell_all();
            channel.is_confirmed.send_replace(true);
        }
    }

    pub(crate) fn hear(&self, server: &Server, news: Event<'_>) {
        match news {
            Event::Over(name) => self.ended(server, &Arc::from(name)),
            Event::Message(name, whose) => {
                let state = self.state();
                let Some(channel) = state.channels.get(name) else { return };
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
        }
    }

    /// Channels to subscribe to, new ones and those that were refused before, of these whichever is still listened to; and whether any was refused before.
    pub(crate) fn take_added(&self, server: &Server, mut again: Vec<Arc<str>>) -> (Vec<Arc<str>>, bool) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let mut added = links.get_mut(server).map(|link| std::mem::take(&mut link.added)).unwrap_or_default();
        for names in [&mut added, &mut again] {
            names.retain(|name| channels.get(name).is_some_and(|channel| channel.is_at(server)));
        }
        let is_again = !again.is_empty();
        added.append(&mut again);
        (added, is_again)
    }

    pub(crate) fn refused(&self, missing: Permission) {
        if self.state().missing.replace(missing) == Some(missing) {
            return;
        }
        let missing = match missing {
            Permission::Command(name) => format!("+{name}"),
            Permission::Channels => "&<prefix>:2:*".to_owned(),
        };
        tracing::warn!(
            missing,
            "the redis user may not listen for those who wait: workers of queues look every five seconds instead, all others once a second"
        );
    }

    /// Nothing was refused of what was asked for, with or without channels that were refused before.
    pub(crate) fn allowed(&self, again: bool) {
        let mut state = self.state();
        if again || matches!(state.missing, Some(Permission::Command(_))) {
            state.missing = None;
        }
    }

    /// Takes out the channels that have moved to another server and those without listeners for a while, and says when to look again.
    pub(crate) fn take_unused(&self, server: &Server, now: Instant) -> (Vec<Arc<str>>, Option<Instant>) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let Some(link) = links.get_mut(server) else { return (Vec::new(), None) };
        let mut unused = std::mem::take(&mut link.left);
        // One of them may have come back.
        unused.retain(|name| channels.get(name).is_none_or(|channel| !channel.is_at(server)));
        while let Some((since, _)) = link.unused.front() {
            if *since + LINGER > now {
                return (unused, Some(*since + LINGER));
            }
            let Some((_, name)) = link.unused.pop_front() else { break };
            if channels.get(&name).is_some_and(|channel| channel.listeners == 0 && channel.is_at(server)) {
                channels.remove(&name);
                unused.push(name);
            }
        }
        (unused, None)
    }
}

#[cfg(test)]
mod tests {
    use redis::{AsyncConnectionConfig, Client};

    use super::*;
    use crate::backend::redis::connection::connect::Connector;
    use crate::backend::redis::connection::pubsub::{Listened, Listener as Ear};
    use crate::backend::redis::connection::subscriptions::{Subscriptions, adapt};
    use crate::backend::redis::differential::server::RedisServer;

    /// A channel that was refused, and that nobody listens to any more when it is due to be asked for again, was taken for one that is allowed if another
    /// channel was allowed at that moment: the next refusal was a warning once more.
    #[tokio::test]
    async fn what_is_still_refused_is_not_forgotten_when_something_else_is_allowed() {
        let server = RedisServer::start();
        server.query::<()>("ACL SETUSER half on >secret ~* resetchannels &lock:* +@all");
        let client = Client::open(server.url().replace("://", "://half:secret@")).unwrap();
        let connector = Connector::Client(Box::new((client, AsyncConnectionConfig::new())));
        let patience = Duration::from_secs(10);
        let source =
            Source { servers: Listened::One(connector), connect_timeout: patience, response_timeout: patience };
        let mut ear = Ear::open(&source, &Server::Only, |_| {}).await.unwrap();
        let subscriber = Subscriber::new(source, Arc::new(RuntimeHandle::here()));
        let shared = &subscriber.shared;
        let missing = || shared.state().missing;
        let mut subscriptions = Subscriptions::default();

        let gone = subscriber.listen("operation:a".into(), Interest::Changes);
        // What the task would do is done here.
        shared.state().links.get(&Server::Only).unwrap().task.abort();
        while !shared.state().links.get(&Server::Only).unwrap().task.is_finished() {
            tokio::task::yield_now().await;
        }
        shared.state().links.get_mut(&Server::Only).unwrap().task =
            tokio::spawn(std::future::pending::<()>()).abort_handle();
        adapt(shared, &Server::Only, &mut ear, &mut subscriptions).await.unwrap();
        assert_eq!(missing(), Some(Permission::Channels));
        drop(gone);
        let (unused, _) = shared.take_unused(&Server::Only, Instant::now() + LINGER);
        assert_eq!(unused.len(), 1);

        let _lock = subscriber.listen("lock:a".into(), Interest::Changes);
        subscriptions.again_at = Some(Instant::now());
        adapt(shared, &Server::Only, &mut ear, &mut subscriptions).await.unwrap();
        assert!(subscriber.listens_to("lock:a"));
        assert_eq!(missing(), Some(Permission::Channels));

        // Until somebody allows what is listened to.
        let _wanted = subscriber.listen("operation:b".into(), Interest::Changes);
        adapt(shared, &Server::Only, &mut ear, &mut subscriptions).await.unwrap();
        assert_eq!(missing(), Some(Permission::Channels));
        server.query::<()>("ACL SETUSER half &operation:*");
        subscriptions.again_at = Some(Instant::now());
        adapt(shared, &Server::Only, &mut ear, &mut subscriptions).await.unwrap();
        assert!(subscriber.listens_to("operation:b"));
        assert_eq!(missing(), None);
    }
}

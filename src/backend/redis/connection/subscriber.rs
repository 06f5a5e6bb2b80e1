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
use crate::backend::redis::metrics::Metrics;
use crate::lock::store::{Notifications, Token};

/// How long a waiter waits for the confirmation of its subscription. After that, it polls.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a channel without listeners stays subscribed: a contended lock is soon wanted again.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
/// How often to request a read of the slot map while a channel has no known node.
const UNASSIGNED_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause between reads of the slot map while it keeps pointing to nodes that refuse the channels.
const MAX_REFUSAL_PAUSE: Duration = Duration::from_millis(500);

/// Subscriptions of this process, on one connection to each server that has a channel in use.
pub(crate) struct Subscriber {
    // Where the tasks run.
    _runtime: Arc<RuntimeHandle>,
    shared: Arc<Shared>,
}

/// The state that the tasks of a subscriber share with its listeners.
pub(crate) struct Shared {
    pub(crate) source: Source,
    pub(crate) metrics: Metrics,
    runtime: Weak<RuntimeHandle>,
    state: Mutex<State>,
    // Wakes the router: a channel has no server, or a link has ended.
    router_wake: Notify,
}

#[derive(Default)]
struct State {
    channels: HashMap<Arc<str>, Channel>,
    // One for each server with channels.
    links: HashMap<Server, Link>,
    // The permission that was found missing last.
    missing: Option<Permission>,
    // On a cluster, the task that assigns channels to nodes.
    router: Option<AbortHandle>,
}

struct Channel {
    // The server of the channel. `None` while the cluster node is unknown.
    server: Option<Server>,
    // The server that refused the channel last, although it has the slot according to the map.
    refused_by: Option<Server>,
    listeners: usize,
    is_confirmed: watch::Sender<bool>,
    messages: watch::Sender<()>,
    // Only published messages; not possible losses of messages.
    sent: watch::Sender<()>,
    // For waiters in a wait queue, which are notified when it is their turn.
    by_token: HashMap<Token, watch::Sender<()>>,
}

/// Work for the task that subscribes at one server.
struct Link {
    // Channels to subscribe to.
    to_subscribe: Vec<Arc<str>>,
    // Channels that have moved to another server.
    moved: Vec<Arc<str>>,
    // Channels that had no listeners at that time, oldest first.
    unused: VecDeque<(Instant, Arc<str>)>,
    wake: Arc<Notify>,
    task: AbortHandle,
}

/// What wakes a listener.
#[derive(Clone, Copy)]
pub(crate) enum Interest {
    /// Each message for all, and each possible loss of messages.
    Changes,
    /// Like `Changes`, and each message for this token.
    Turn(Token),
    /// Each message for all, and nothing else.
    Messages,
}

/// A listener. Some time after the last listener is dropped, the channel is unsubscribed from.
struct Listener {
    shared: Arc<Shared>,
    channel: Arc<str>,
    interest: Interest,
}

impl Subscriber {
    pub(crate) fn new(source: Source, runtime: Arc<RuntimeHandle>) -> Self {
        let (state, router_wake, metrics) = (Mutex::default(), Notify::new(), Metrics::new());
        let shared = Arc::new(Shared { source, metrics, runtime: Arc::downgrade(&runtime), state, router_wake });
        Self { _runtime: runtime, shared }
    }

    /// Subscribes to notifications on a channel. Messages may be lost while the connection is replaced; after that, there is one
    /// notification. Ready when the server has confirmed the subscription, or after a timeout. In the latter case, messages may be lost
    /// until the confirmation.
    pub(crate) async fn subscribe(&self, channel: String, interest: Interest) -> Notifications {
        if !self.shared.source.can_subscribe() {
            return Notifications::none();
        }
        let (listener, mut is_confirmed, mut messages) = self.listen(channel.into(), interest);
        if timeout(CONFIRMATION_TIMEOUT, is_confirmed.wait_for(|is_confirmed| *is_confirmed)).await.is_ok() {
            messages.mark_unchanged();
        }
        Notifications::new(messages, Arc::new(listener))
    }

    /// Whether the server has confirmed the subscription of this process.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        self.shared.state().channels.get(channel).is_some_and(|channel| *channel.is_confirmed.borrow())
    }

    fn listen(&self, name: Arc<str>, interest: Interest) -> (Listener, watch::Receiver<bool>, watch::Receiver<()>) {
        let shared = &self.shared;
        let mut state = shared.state();
        shared.restart_tasks(&mut state);
        let is_new = !state.channels.contains_key(&name);
        let channel = state.channels.entry(Arc::clone(&name)).or_insert_with(Channel::new);
        channel.listeners += 1;
        let messages = match interest {
            Interest::Changes => &channel.messages,
            Interest::Messages => &channel.sent,
            Interest::Turn(token) => channel.by_token.entry(token).or_insert_with(|| watch::Sender::new(())),
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
            by_token: HashMap::new(),
        }
    }

    fn notify_all(&self) {
        self.messages.send_replace(());
        for sender in self.by_token.values() {
            sender.send_replace(());
        }
    }

    fn is_at(&self, server: &Server) -> bool {
        self.server.as_ref() == Some(server)
    }
}

impl State {
    /// Takes a channel away from a server, and tells the server's task to forget it.
    fn unassign(&mut self, server: &Server, name: &Arc<str>) -> Option<&mut Channel> {
        let channel = self.channels.get_mut(name).filter(|channel| channel.is_at(server))?;
        channel.server = None;
        channel.is_confirmed.send_replace(false);
        if let Some(link) = self.links.get_mut(server) {
            link.moved.push(Arc::clone(name));
            link.wake.notify_one();
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
            channel.by_token.remove(token);
        }
        if channel.listeners > 0 {
            return;
        }
        let Some(link) = channel.server.as_ref().and_then(|server| links.get_mut(server)) else {
            // There is no subscription to end.
            channels.remove(&self.channel);
            return;
        };
        link.unused.push_back((Instant::now(), Arc::clone(&self.channel)));
        if link.unused.len() == 1 {
            // From now on, the task has a timeout to watch.
            link.wake.notify_one();
        }
    }
}

/// Assigns channels to servers.
impl Shared {
    /// No panic is possible while the lock is held, so poisoned state is consistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        match self.runtime.upgrade() {
            Some(runtime) => runtime.spawn(task),
            None => tokio::spawn(task).abort_handle(),
        }
    }

    /// Restarts the tasks that ended with their runtime.
    fn restart_tasks(self: &Arc<Self>, state: &mut State) {
        for (server, link) in &mut state.links {
            if link.task.is_finished() {
                link.task = self.spawn(run(Arc::clone(self), server.clone()));
            }
        }
        if let Some(map_reads) = self.source.map_reads()
            && state.router.as_ref().is_none_or(AbortHandle::is_finished)
        {
            state.router = Some(self.spawn(route(Arc::clone(self), map_reads)));
        }
    }

    /// Assigns a channel to the task of its server. Returns whether that server has refused the channel before.
    fn assign(self: &Arc<Self>, state: &mut State, name: &Arc<str>) -> bool {
        let State { channels, links, .. } = state;
        let Some(channel) = channels.get_mut(name) else { return false };
        let Some(server) = self.source.server_of(name) else {
            if channel.server.is_none() {
                self.router_wake.notify_one();
            }
            return false;
        };
        if channel.is_at(&server) {
            return false;
        }
        // `refused_by` stays set, for the next refusal.
        channel.refused_by.take_if(|refusing| *refusing != server);
        let is_refused_again = channel.refused_by.is_some();
        channel.is_confirmed.send_replace(false);
        if let Some(link) = channel.server.replace(server.clone()).and_then(|old| links.get_mut(&old)) {
            link.moved.push(Arc::clone(name));
            link.wake.notify_one();
        }
        let link = links.entry(server).or_insert_with_key(|server| Link {
            to_subscribe: Vec::new(),
            moved: Vec::new(),
            unused: VecDeque::new(),
            wake: Arc::default(),
            task: self.spawn(run(Arc::clone(self), server.clone())),
        });
        link.to_subscribe.push(Arc::clone(name));
        if channel.listeners == 0 {
            link.unused.push_back((Instant::now(), Arc::clone(name)));
        }
        link.wake.notify_one();
        is_refused_again
    }

    /// Assigns all channels after a read of the map. Returns a channel whose new server has refused it before.
    fn assign_all(self: &Arc<Self>) -> Option<Arc<str>> {
        let mut state = self.state();
        let mut names: Vec<_> = state.channels.keys().cloned().collect();
        names.retain(|name| self.assign(&mut state, name));
        names.pop()
    }

    /// Whether a server has refused a channel, and no other server has been found for it.
    fn has_refused(&self) -> bool {
        self.state().channels.values().any(|channel| channel.refused_by.is_some())
    }

    /// Records that a server has ended the subscription to a channel.
    fn subscription_ended(&self, server: &Server, name: &Arc<str>) {
        self.state().unassign(server, name);
        self.router_wake.notify_one();
    }

    /// Records that a server has refused channels although it has their slots according to the map.
    pub(crate) fn refused_by_node(&self, server: &Server, names: &[Arc<str>]) {
        self.metrics.subscription_failed();
        let mut state = self.state();
        for name in names {
            if let Some(channel) = state.unassign(server, name) {
                channel.refused_by = Some(server.clone());
            }
        }
        self.router_wake.notify_one();
    }

    /// Whether any channel has no server.
    fn has_unassigned(&self) -> bool {
        self.state().channels.values().any(|channel| channel.server.is_none())
    }

    /// A channel whose slot no node serves.
    fn unserved(&self) -> Option<Arc<str>> {
        let state = self.state();
        let mut unassigned = state.channels.iter().filter(|(_, channel)| channel.server.is_none());
        unassigned.find(|(name, _)| self.source.server_of(name).is_none()).map(|(name, _)| Arc::clone(name))
    }

    /// Whether there are no channels any more. The router then ends, and the next listener starts another.
    fn should_stop_routing(&self) -> bool {
        let mut state = self.state();
        let should_stop_routing = state.channels.is_empty();
        if should_stop_routing {
            state.router = None;
        }
        should_stop_routing
    }
}

/// Consecutive maps that point to nodes which refuse the channels.
#[derive(Default)]
struct Refusals {
    pause: Duration,
    is_logged: bool,
}

impl Refusals {
    /// How long to wait after one more refusal.
    fn pause(&mut self, channel: &str) -> Duration {
        self.pause = (self.pause * 2).clamp(UNASSIGNED_PAUSE, MAX_REFUSAL_PAUSE);
        // While a slot moves, nodes may disagree for a moment.
        if self.pause == MAX_REFUSAL_PAUSE && !std::mem::replace(&mut self.is_logged, true) {
            tracing::warn!(
                channel,
                "cannot subscribe to redis, the node of the slot refuses; waiters and workers poll meanwhile"
            );
        }
        self.pause
    }
}

/// Assigns channels to cluster nodes after each read of the map.
async fn route(shared: Arc<Shared>, mut map_reads: watch::Receiver<()>) {
    let (mut is_unserved, mut refusals) = (false, Refusals::default());
    while !shared.should_stop_routing() {
        let has_unassigned = shared.has_unassigned();
        if has_unassigned {
            shared.source.refresh_map();
        }
        tokio::select! {
            read = map_reads.changed() => if read.is_err() { return },
            // The current map points to a node that does not have the channel. Wait for the next read.
            () = shared.router_wake.notified() => continue,
            () = sleep(UNASSIGNED_PAUSE), if has_unassigned => {}
        }
        let refused_again = shared.assign_all();
        if !shared.has_refused() {
            refusals = Refusals::default();
        }
        if let Some(channel) = refused_again {
            sleep(refusals.pause(&channel)).await;
        }
        let unserved = shared.unserved();
        let was_unserved = std::mem::replace(&mut is_unserved, unserved.is_some());
        let Some(channel) = unserved else { continue };
        shared.metrics.subscription_failed();
        if !was_unserved {
            tracing::warn!(%channel, "cannot subscribe to redis, no node serves the slot; waiters and workers poll meanwhile");
        }
    }
}

/// The interface for the task that subscribes at one server.
impl Shared {
    /// Whether a server has no channels any more. Its task then ends, and the next listener there starts another.
    pub(crate) fn is_idle(&self, server: &Server) -> bool {
        let mut state = self.state();
        if state.channels.values().any(|channel| channel.is_at(server)) {
            return false;
        }
        state.links.remove(server);
        // These may have been the last channels.
        self.router_wake.notify_one();
        true
    }

    /// Notified when the task of a server has work.
    pub(crate) fn wake(&self, server: &Server) -> Arc<Notify> {
        self.state().links.get(server).map(|link| Arc::clone(&link.wake)).unwrap_or_default()
    }

    /// Marks all channels of a server as unconfirmed, and as channels to subscribe to.
    pub(crate) fn resubscribe_all(&self, server: &Server) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let Some(link) = links.get_mut(server) else { return };
        link.moved.clear();
        link.to_subscribe.clear();
        for (name, channel) in channels.iter().filter(|(_, channel)| channel.is_at(server)) {
            link.to_subscribe.push(Arc::clone(name));
            channel.is_confirmed.send_replace(false);
        }
    }

    /// Records that a server delivers the messages of channels from now on.
    pub(crate) fn confirmed(&self, server: &Server, names: &[Arc<str>]) {
        let mut state = self.state();
        for name in names {
            let Some(channel) = state.channels.get_mut(name).filter(|channel| channel.is_at(server)) else { continue };
            channel.refused_by = None;
            // Earlier messages were lost.
            channel.notify_all();
            channel.is_confirmed.send_replace(true);
        }
    }

    pub(crate) fn handle_event(&self, server: &Server, event: Event<'_>) {
        match event {
            Event::Ended(name) => self.subscription_ended(server, &Arc::from(name)),
            Event::Message(name, token) => {
                let state = self.state();
                let Some(channel) = state.channels.get(name) else { return };
                match token {
                    None => {
                        channel.notify_all();
                        channel.sent.send_replace(());
                    }
                    Some(token) => {
                        if let Some(sender) = channel.by_token.get(&token) {
                            sender.send_replace(());
                        }
                    }
                }
            }
        }
    }

    /// Channels to subscribe to: new channels, and formerly refused channels with listeners. Also whether there are any of the latter.
    pub(crate) fn take_new(&self, server: &Server, mut refused: Vec<Arc<str>>) -> (Vec<Arc<str>>, bool) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let mut to_subscribe =
            links.get_mut(server).map(|link| std::mem::take(&mut link.to_subscribe)).unwrap_or_default();
        for names in [&mut to_subscribe, &mut refused] {
            names.retain(|name| channels.get(name).is_some_and(|channel| channel.is_at(server)));
        }
        let includes_refused = !refused.is_empty();
        to_subscribe.append(&mut refused);
        (to_subscribe, includes_refused)
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
            "the redis user may not subscribe: queue workers poll every 5 s, and waiters once a second"
        );
    }

    /// Records that no subscription was refused. `includes_refused`: among them were formerly refused channels.
    pub(crate) fn allowed(&self, includes_refused: bool) {
        let mut state = self.state();
        if includes_refused || matches!(state.missing, Some(Permission::Command(_))) {
            state.missing = None;
        }
    }

    /// Removes the channels that have moved to another server or had no listeners for a while. Also returns when to call this again.
    pub(crate) fn take_unused(&self, server: &Server, now: Instant) -> (Vec<Arc<str>>, Option<Instant>) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let Some(link) = links.get_mut(server) else { return (Vec::new(), None) };
        let mut unused = std::mem::take(&mut link.moved);
        // A channel may have come back.
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
    use crate::backend::redis::connection::pubsub::{Listener as PubSubListener, Publishers};
    use crate::backend::redis::connection::subscriptions::{Subscriptions, sync};
    use crate::backend::redis::differential::server::RedisServer;

    /// If a refused channel had lost its listeners by the time of its retry, the refusal was forgotten as soon as another channel was
    /// allowed. The next refusal was then logged as a warning again.
    #[tokio::test]
    async fn refused_channel_is_remembered_while_another_is_allowed() {
        let server = RedisServer::start();
        server.query::<()>("ACL SETUSER half on >secret ~* resetchannels &lock:* +@all");
        let client = Client::open(server.url().replace("://", "://half:secret@")).unwrap();
        let connector = Connector::Client(Box::new((client, AsyncConnectionConfig::new())));
        let timeout = Duration::from_secs(10);
        let source =
            Source { servers: Publishers::One(connector), connect_timeout: timeout, response_timeout: timeout };
        let mut listener = PubSubListener::open(&source, &Server::Only, |_| {}).await.unwrap();
        let subscriber = Subscriber::new(source, Arc::new(RuntimeHandle::here()));
        let shared = &subscriber.shared;
        let missing = || shared.state().missing;
        let mut subscriptions = Subscriptions::default();

        let dropped = subscriber.listen("operation:a".into(), Interest::Changes);
        // The test does the work of the task.
        shared.state().links.get(&Server::Only).unwrap().task.abort();
        while !shared.state().links.get(&Server::Only).unwrap().task.is_finished() {
            tokio::task::yield_now().await;
        }
        shared.state().links.get_mut(&Server::Only).unwrap().task =
            tokio::spawn(std::future::pending::<()>()).abort_handle();
        sync(shared, &Server::Only, &mut listener, &mut subscriptions).await.unwrap();
        assert_eq!(missing(), Some(Permission::Channels));
        drop(dropped);
        let (unused, _) = shared.take_unused(&Server::Only, Instant::now() + LINGER);
        assert_eq!(unused.len(), 1);

        let _lock = subscriber.listen("lock:a".into(), Interest::Changes);
        subscriptions.retry_at = Some(Instant::now());
        sync(shared, &Server::Only, &mut listener, &mut subscriptions).await.unwrap();
        assert!(subscriber.listens_to("lock:a"));
        assert_eq!(missing(), Some(Permission::Channels));

        // Until the user may subscribe to the channel.
        let _wanted = subscriber.listen("operation:b".into(), Interest::Changes);
        sync(shared, &Server::Only, &mut listener, &mut subscriptions).await.unwrap();
        assert_eq!(missing(), Some(Permission::Channels));
        server.query::<()>("ACL SETUSER half &operation:*");
        subscriptions.retry_at = Some(Instant::now());
        sync(shared, &Server::Only, &mut listener, &mut subscriptions).await.unwrap();
        assert!(subscriber.listens_to("operation:b"));
        assert_eq!(missing(), None);
    }
}

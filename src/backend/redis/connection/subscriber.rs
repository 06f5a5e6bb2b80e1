//! Subscriptions for listeners: assigns channels to servers, and starts a task for each server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::channels::{Channel, Link, Shared, State};
use super::pubsub::Source;
use super::runtime::RuntimeHandle;
use super::subscriptions::run;
use crate::lock::store::{Notifications, Token};

/// How long a waiter waits for the confirmation of its subscription. After that, it polls.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_millis(200);

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

/// What wakes a listener.
#[derive(Clone, Copy)]
pub(crate) enum Interest {
    /// Each message without a token, and each possible loss of messages.
    Changes,
    /// Like `Changes`, and each message with this token.
    Turn(Token),
    /// Each message without a token, and nothing else.
    Messages,
}

/// A listener. Some time after the last listener is dropped, the channel is unsubscribed from.
struct Listener {
    shared: Arc<Shared>,
    channel: Arc<str>,
    interest: Interest,
}

/// A new listener with its receivers.
struct Receivers {
    listener: Listener,
    is_confirmed: watch::Receiver<bool>,
    changes: watch::Receiver<()>,
    messages: watch::Receiver<()>,
}

impl Subscriber {
    pub(crate) fn new(source: Source, runtime: Arc<RuntimeHandle>) -> Self {
        let shared = Arc::new(Shared::new(source, &runtime));
        Self { _runtime: runtime, shared }
    }

    /// Subscribes to notifications on a channel. Messages may be lost while the connection is replaced; after that, there is one
    /// notification. Ready when the server has confirmed the subscription, or after a timeout. In the latter case, messages may be lost
    /// until the confirmation.
    pub(crate) async fn subscribe(&self, channel: String, interest: Interest) -> Notifications {
        if !self.shared.source.can_subscribe() {
            return Notifications::none();
        }
        let Receivers { listener, mut is_confirmed, mut changes, messages } = self.listen(channel.into(), interest);
        if timeout(CONFIRMATION_TIMEOUT, is_confirmed.wait_for(|is_confirmed| *is_confirmed)).await.is_ok() {
            changes.mark_unchanged();
        } else {
            // Messages may be lost before the confirmation, so notify the listener at once.
            changes.mark_changed();
        }
        Notifications::new(changes, Arc::new(listener)).with_messages(messages)
    }

    /// Whether the server has confirmed the subscription of this process.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        self.shared.state().channels.get(channel).is_some_and(|channel| *channel.is_confirmed.borrow())
    }

    fn listen(&self, name: Arc<str>, interest: Interest) -> Receivers {
        let shared = &self.shared;
        let mut state = shared.state();
        restart_tasks(shared, &mut state);
        let is_new = !state.channels.contains_key(&name);
        let channel = state.channels.entry(Arc::clone(&name)).or_insert_with(Channel::new);
        channel.listeners += 1;
        let changes = match interest {
            Interest::Changes => &channel.changes,
            Interest::Messages => &channel.messages,
            Interest::Turn(token) => channel.by_token.entry(token).or_insert_with(|| watch::Sender::new(())),
        };
        let (is_confirmed, changes) = (channel.is_confirmed.subscribe(), changes.subscribe());
        let messages = channel.messages.subscribe();
        if is_new {
            assign(shared, &mut state, &name);
        }
        let listener = Listener { shared: Arc::clone(shared), channel: name, interest };
        Receivers { listener, is_confirmed, changes, messages }
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

/// Restarts the tasks that ended with their runtime. On a cluster, also starts the router if none runs.
fn restart_tasks(shared: &Arc<Shared>, state: &mut State) {
    for (server, link) in &mut state.links {
        if link.task.is_finished() {
            link.task = shared.spawn(run(Arc::clone(shared), server.clone()));
        }
    }
    if let Some(map_reads) = shared.source.map_reads()
        && state.router.as_ref().is_none_or(AbortHandle::is_finished)
    {
        state.router = Some(shared.spawn(route(Arc::clone(shared), map_reads)));
    }
}

/// Assigns a channel to the task of its server. Returns whether that server has refused the channel before.
fn assign(shared: &Arc<Shared>, state: &mut State, name: &Arc<str>) -> bool {
    let State { channels, links, .. } = state;
    let Some(channel) = channels.get_mut(name) else { return false };
    let Some(server) = shared.source.server_of(name) else {
        if channel.server.is_none() {
            shared.router_wake.notify_one();
        }
        return false;
    };
    if channel.is_at(&server) {
        return false;
    }
    // `refused_by` stays set only if the map names the refusing server again.
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
        task: shared.spawn(run(Arc::clone(shared), server.clone())),
    });
    link.to_subscribe.push(Arc::clone(name));
    if channel.listeners == 0 {
        link.unused.push_back((Instant::now(), Arc::clone(name)));
    }
    link.wake.notify_one();
    is_refused_again
}

/// Assigns all channels after a read of the map. Returns a channel whose new server has refused it before.
fn assign_all(shared: &Arc<Shared>) -> Option<Arc<str>> {
    let mut state = shared.state();
    let mut names: Vec<_> = state.channels.keys().cloned().collect();
    names.retain(|name| assign(shared, &mut state, name));
    names.pop()
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
        // While a slot moves, nodes may disagree for a moment, so only repeated refusals are logged.
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
    while !shared.stop_routing_if_idle() {
        let has_unassigned = shared.has_unassigned();
        if has_unassigned {
            shared.source.refresh_map();
        }
        tokio::select! {
            read = map_reads.changed() => if read.is_err() { return },
            // A channel has lost its server, has no known node, or was the last one. Wait for the next read.
            () = shared.router_wake.notified() => continue,
            () = sleep(UNASSIGNED_PAUSE), if has_unassigned => {}
        }
        let refused_again = assign_all(&shared);
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

#[cfg(test)]
mod tests {
    use redis::{AsyncConnectionConfig, Client};

    use super::*;
    use crate::backend::redis::connection::channels::LINGER;
    use crate::backend::redis::connection::connector::Connector;
    use crate::backend::redis::connection::pubsub::{Permission, Publishers, Server, SubscriptionConnection};
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
        let mut listener = SubscriptionConnection::open(&source, &Server::Only, |_| {}).await.unwrap();
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

        // The permission is missing until the user may subscribe to the channel.
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

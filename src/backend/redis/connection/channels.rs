//! The channels that this process subscribes to: their listeners, their servers, and the pending changes at each server.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::pubsub::{Event, Permission, Server, Source};
use super::runtime::RuntimeHandle;
use crate::backend::redis::metrics::Metrics;
use crate::lock::store::Token;

/// How long a channel without listeners stays subscribed: a contended lock is soon wanted again.
pub(crate) const LINGER: Duration = Duration::from_secs(2);

/// The state that the tasks of a subscriber share with its listeners.
pub(crate) struct Shared {
    pub(crate) source: Source,
    pub(crate) metrics: Metrics,
    runtime: Weak<RuntimeHandle>,
    state: Mutex<State>,
    // Wakes the router, the task that assigns channels to cluster nodes: a channel has no server, or a link has ended.
    pub(super) router_wake: Notify,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) channels: HashMap<Arc<str>, Channel>,
    // One for each server with channels.
    pub(super) links: HashMap<Server, Link>,
    // The missing permission that the last warning named.
    pub(super) missing: Option<Permission>,
    // On a cluster, the task that assigns channels to nodes.
    pub(super) router: Option<AbortHandle>,
}

pub(super) struct Channel {
    // The server of the channel. `None` while the cluster node is unknown.
    pub(super) server: Option<Server>,
    // The server that refused the channel last, although the cluster's slot map assigns the slot to it.
    pub(super) refused_by: Option<Server>,
    pub(super) listeners: usize,
    pub(super) is_confirmed: watch::Sender<bool>,
    pub(super) changes: watch::Sender<()>,
    // Only published messages; not possible losses of messages.
    pub(super) messages: watch::Sender<()>,
    // For waiters in a wait queue: a message with a token is for the waiter with this token only.
    pub(super) by_token: HashMap<Token, watch::Sender<()>>,
}

/// Work for the task that subscribes at one server.
pub(super) struct Link {
    // Channels to subscribe to.
    pub(super) to_subscribe: Vec<Arc<str>>,
    // Channels that have moved to another server.
    pub(super) moved: Vec<Arc<str>>,
    // Channels without listeners, and since when, oldest first.
    pub(super) unused: VecDeque<(Instant, Arc<str>)>,
    pub(super) wake: Arc<Notify>,
    pub(super) task: AbortHandle,
}

impl Channel {
    pub(super) fn new() -> Self {
        Self {
            server: None,
            refused_by: None,
            listeners: 0,
            is_confirmed: watch::Sender::new(false),
            changes: watch::Sender::new(()),
            messages: watch::Sender::new(()),
            by_token: HashMap::new(),
        }
    }

    fn notify_all(&self) {
        self.changes.send_replace(());
        for sender in self.by_token.values() {
            sender.send_replace(());
        }
    }

    pub(super) fn is_at(&self, server: &Server) -> bool {
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

/// The interface for the task that assigns channels to servers.
impl Shared {
    pub(super) fn new(source: Source, runtime: &Arc<RuntimeHandle>) -> Self {
        let (state, router_wake, metrics) = (Mutex::default(), Notify::new(), Metrics::new());
        Self { source, metrics, runtime: Arc::downgrade(runtime), state, router_wake }
    }

    /// No panic is possible while the lock is held, so poisoned state is consistent.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        match self.runtime.upgrade() {
            Some(runtime) => runtime.spawn(task),
            None => tokio::spawn(task).abort_handle(),
        }
    }

    /// Whether a server has refused a channel, and no other server has been found for it.
    pub(super) fn has_refused(&self) -> bool {
        self.state().channels.values().any(|channel| channel.refused_by.is_some())
    }

    /// Records that a server has ended the subscription to a channel.
    fn subscription_ended(&self, server: &Server, name: &Arc<str>) {
        self.state().unassign(server, name);
        self.router_wake.notify_one();
    }

    /// Records that a server has refused channels, although the cluster's slot map assigns their slots to it.
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
    pub(super) fn has_unassigned(&self) -> bool {
        self.state().channels.values().any(|channel| channel.server.is_none())
    }

    /// A channel whose slot no node serves.
    pub(super) fn unserved(&self) -> Option<Arc<str>> {
        let state = self.state();
        let mut unassigned = state.channels.iter().filter(|(_, channel)| channel.server.is_none());
        unassigned.find(|(name, _)| self.source.server_of(name).is_none()).map(|(name, _)| Arc::clone(name))
    }

    /// Whether there are no channels any more. The router then ends, and the next listener starts another.
    pub(super) fn stop_routing_if_idle(&self) -> bool {
        let mut state = self.state();
        let is_idle = state.channels.is_empty();
        if is_idle {
            state.router = None;
        }
        is_idle
    }
}

/// The interface for the task that subscribes at one server.
impl Shared {
    /// Whether a server has no channels any more. Its task then ends, and the next listener there starts another.
    pub(crate) fn remove_link_if_idle(&self, server: &Server) -> bool {
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
    pub(crate) fn record_confirmed(&self, server: &Server, names: &[Arc<str>]) {
        let mut state = self.state();
        for name in names {
            let Some(channel) = state.channels.get_mut(name).filter(|channel| channel.is_at(server)) else { continue };
            channel.refused_by = None;
            // Messages before the confirmation may be lost.
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
                        channel.messages.send_replace(());
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

    /// Takes the channels to subscribe to: new channels, and the channels of `refused` that are still assigned to the server. Also returns
    /// whether a channel of `refused` is among them.
    pub(crate) fn take_to_subscribe(&self, server: &Server, mut refused: Vec<Arc<str>>) -> (Vec<Arc<str>>, bool) {
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

    pub(crate) fn record_missing_permission(&self, missing: Permission) {
        if self.state().missing.replace(missing) == Some(missing) {
            return;
        }
        let missing = match missing {
            Permission::Command(name) => format!("+{name}"),
            Permission::Channels => "&<prefix>:2:*".to_owned(),
        };
        tracing::warn!(
            missing,
            "the redis user may not subscribe: queue workers poll every 5 s, and waiters once a second; grant it the permission in the field `missing`"
        );
    }

    /// Records that no subscription was refused. `includes_refused`: formerly refused channels were among the subscribed ones.
    pub(crate) fn record_allowed(&self, includes_refused: bool) {
        let mut state = self.state();
        if includes_refused || matches!(state.missing, Some(Permission::Command(_))) {
            state.missing = None;
        }
    }

    /// Removes channels that had no listeners for [`LINGER`]. Returns the channels to unsubscribe from, which are these and the moved
    /// channels, and when to call this again.
    pub(crate) fn take_unused(&self, server: &Server, now: Instant) -> (Vec<Arc<str>>, Option<Instant>) {
        let mut state = self.state();
        let State { channels, links, .. } = &mut *state;
        let Some(link) = links.get_mut(server) else { return (Vec::new(), None) };
        let mut unused = std::mem::take(&mut link.moved);
        // A channel may have moved back to this server.
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

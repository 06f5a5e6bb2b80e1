//! Connections to one server: opening, pooling, replies and subscriptions.

pub(crate) mod channels;
pub(crate) mod connect;
pub(crate) mod connector;
pub(crate) mod handle;
pub(crate) mod pool;
pub(crate) mod pubsub;
pub(crate) mod runtime;
pub(crate) mod subscriber;
pub(crate) mod subscriptions;
pub(crate) mod timeout_error;

//! The settings of a layer, which its services share.

use std::sync::Arc;
use std::time::Duration;

use super::stored::{Stored, StoredCodec};
use super::uncached::Uncached;
use crate::cache::Cache;

/// The settings that do not depend on the types of requests and responses. A load has them too.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) is_public: bool,
    pub(super) ignores_cookies: bool,
    pub(super) fresh_for: Option<Duration>,
    pub(super) load_timeout: Duration,
    pub(super) max_response: usize,
    pub(super) uncached: Arc<Uncached>,
}

/// The shared state of all clones of a service.
pub(super) struct Shared<K, A> {
    pub(super) cache: Arc<Cache<Stored, StoredCodec>>,
    pub(super) settings: Arc<Settings>,
    pub(super) principal: Arc<K>,
    pub(super) responder: A,
}

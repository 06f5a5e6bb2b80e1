use std::time::Duration;

/// What a loader returns: a value, the fact that the origin has none, or a value that must not be cached.
///
/// A loader may also return the value itself, or an `Option`, whose `None` means [absent](Self::absent):
///
/// ```
/// use std::time::Duration;
/// use tollgate::cache::Loaded;
///
/// assert_eq!(Loaded::from("value"), Loaded::value("value"));
/// assert_eq!(Loaded::<&str>::from(None), Loaded::absent());
/// let short = Loaded::value("price").fresh_for(Duration::from_secs(5));
/// let passing = Loaded::uncached("price of this moment");
/// # let _ = (short, passing);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded<T> {
    pub(super) value: Option<T>,
    pub(super) fresh_for: Option<Duration>,
    pub(super) stale_for: Option<Duration>,
    pub(super) is_cached: bool,
}

impl<T> Loaded<T> {
    /// A value to cache.
    pub const fn value(value: T) -> Self {
        Self { value: Some(value), fresh_for: None, stale_for: None, is_cached: true }
    }

    /// The origin has no value for this key. This is cached for [`absent_for`](super::Cache::absent_for).
    #[must_use]
    pub const fn absent() -> Self {
        Self { value: None, fresh_for: None, stale_for: None, is_cached: true }
    }

    /// A value for the callers of this load only, which are all callers in this process who asked for the key while it ran. So the value
    /// must not depend on the caller. For the time of `fresh_for`, callers that come later load at once, and do not wait for another
    /// process.
    pub const fn uncached(value: T) -> Self {
        Self { value: Some(value), fresh_for: None, stale_for: None, is_cached: false }
    }

    /// The times that were set: fresh, and stale after that.
    pub(super) const fn times(&self) -> (Option<Duration>, Option<Duration>) {
        (self.fresh_for, self.stale_for)
    }

    /// How long this value, or its absence, is fresh. Defaults to the time of the cache.
    #[must_use]
    pub fn fresh_for(mut self, time: Duration) -> Self {
        self.fresh_for = Some(time);
        self
    }

    /// How long this value is served after it was fresh. Defaults to the time of the cache. The absence of a value is never stale.
    #[must_use]
    pub fn stale_for(mut self, time: Duration) -> Self {
        self.stale_for = Some(time);
        self
    }

    /// No value for the callers. For this time, each further caller loads its own at once.
    #[cfg(feature = "http")]
    pub(crate) const fn nothing(time: Duration) -> Self {
        Self { value: None, fresh_for: Some(time), stale_for: None, is_cached: false }
    }
}

impl<T> From<T> for Loaded<T> {
    fn from(value: T) -> Self {
        Self::value(value)
    }
}

impl<T> From<Option<T>> for Loaded<T> {
    fn from(value: Option<T>) -> Self {
        Self { value, fresh_for: None, stale_for: None, is_cached: true }
    }
}

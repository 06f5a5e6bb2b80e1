//! Errors of any type, and their causes.

use std::error::Error;
use std::fmt;
use std::io;
use std::iter;
use std::time::Duration;

/// Any boxed error. Services return it when errors of several types can reach their caller.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// An error and its causes, outermost first.
pub(crate) fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        // The inner error of an `io::Error` is not its source.
        Some(inner) => Some(inner),
        None => error.source(),
    })
}

/// A key is in use, for at most this long. It is a separate cause below the public error, so that an error that wraps the public error
/// and forwards only its source still reveals it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContentionHint(pub(crate) Duration);

impl ContentionHint {
    /// For an unknown time.
    pub(crate) const FOR_LONG: &Self = &Self(Duration::MAX);
}

impl fmt::Display for ContentionHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the key may become free at any time")
    }
}

impl Error for ContentionHint {}

//! Which extension a request lacks, so that the message of a rejection can name it in debug builds.
//!
//! An extractor only says that there is no key, and may be part of others. So it records the reason for this thread, which rejects the request
//! before it looks at another one.

#[cfg(debug_assertions)]
use std::cell::Cell;

#[cfg(debug_assertions)]
thread_local! {
    static MISSING: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Records which extension the request lacks.
#[inline]
#[cfg(feature = "http")]
pub(crate) fn record(extension: &'static str) {
    #[cfg(debug_assertions)]
    MISSING.set(Some(extension));
    #[cfg(not(debug_assertions))]
    let _ = extension;
}

/// Forgets what the requests before lacked.
#[inline]
pub(crate) fn forget() {
    #[cfg(debug_assertions)]
    MISSING.set(None);
}

/// What the request lacks, as far as that is known.
#[inline]
pub(crate) fn recorded() -> Option<&'static str> {
    #[cfg(debug_assertions)]
    return MISSING.get();
    #[cfg(not(debug_assertions))]
    None
}

//! Which extension a request lacks, so that the message of a rejection can name it in debug builds.
//!
//! An extractor only says that there is no key, and may be part of others. So it notes the reason for this thread, which rejects the request
//! before it looks at another one.

#[cfg(debug_assertions)]
use std::cell::Cell;

#[cfg(debug_assertions)]
thread_local! {
    static LACK: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Notes what the request lacks.
#[inline]
#[cfg(feature = "http")]
pub(crate) fn note(lack: &'static str) {
    #[cfg(debug_assertions)]
    LACK.set(Some(lack));
    #[cfg(not(debug_assertions))]
    let _ = lack;
}

/// Forgets what the requests before lacked.
#[inline]
pub(crate) fn forget() {
    #[cfg(debug_assertions)]
    LACK.set(None);
}

/// What the request lacks, as far as that is known.
#[inline]
pub(crate) fn noted() -> Option<&'static str> {
    #[cfg(debug_assertions)]
    return LACK.get();
    #[cfg(not(debug_assertions))]
    None
}

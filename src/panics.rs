use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::task::JoinError;

/// Drops what a caught panic carries. That is a value of the panicking code, whose `drop` may panic, too.
pub(crate) fn discard(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // Dropping this one might go on like that for ever.
        mem::forget(second);
    }
}

/// Drops what a task has come to, which may be a panic.
pub(crate) fn discard_joined<T>(ended: Result<T, JoinError>) {
    if let Some(payload) = ended.err().and_then(|error| error.try_into_panic().ok()) {
        discard(payload);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    struct Bomb(u8);

    impl Drop for Bomb {
        fn drop(&mut self) {
            if self.0 > 0 {
                panic_any(Self(self.0 - 1));
            }
        }
    }

    #[tokio::test]
    async fn payload_whose_drop_panics_is_discarded() {
        discard(Box::new("text"));
        discard(Box::new(Bomb(1)));
        discard(Box::new(Bomb(u8::MAX)));
        discard_joined(tokio::spawn(async { panic_any(Bomb(3)) }).await);
    }
}

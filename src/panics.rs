use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::task::JoinError;

/// Drops a value of user code, such as a panic payload or an error, whose `drop` may panic.
pub(crate) fn discard<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        // Dropping this payload could panic again, and so on without end.
        mem::forget(payload);
    }
}

/// Drops the output of a task, or its panic.
pub(crate) fn discard_joined<T>(result: Result<T, JoinError>) {
    match result.map_err(JoinError::try_into_panic) {
        Ok(output) => discard(output),
        Err(Ok(payload)) => discard(payload),
        Err(Err(_)) => {}
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
        discard_joined(tokio::spawn(async { Err::<(), _>(Bomb(3)) }).await);
    }
}

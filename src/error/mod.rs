//! The errors that several modules share.

mod cause;
mod config;
mod connect;
mod store;

pub use self::cause::BoxError;
pub(crate) use self::cause::{ContentionHint, causes};
pub use self::config::ConfigError;
pub use self::connect::{ConnectError, ConnectFailure};
pub use self::store::StoreError;

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn errors_are_send_and_sync() {
        fn is_portable<T: Error + Send + Sync + 'static>() {}
        is_portable::<StoreError>();
        is_portable::<ConfigError>();
        is_portable::<ConnectError>();
    }
}

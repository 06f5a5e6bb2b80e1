//! A script, and how it is called.

use std::time::Duration;

use redis::{Cmd, RedisError, Script, ToRedisArgs, Value};

use crate::backend::redis::error;
use crate::backend::redis::replicated::Outcome;
use crate::backend::redis::topology::{Delivery, Servers};
use crate::error::StoreError;

/// A Lua script and its hash, by which Redis identifies it.
#[derive(Debug)]
pub(crate) struct LuaScript {
    code: String,
    hash: String,
}

/// Declares a struct with a field for each script: its file in `lua/`, and the includes before it, as its header names them. `and` adds a
/// field with its default.
macro_rules! scripts {
    (
        $(#[$doc:meta])*
        pub(crate) struct $scripts:ident {
            $($script:ident: $file:literal $(after $($include:ident)+)?;)+
        }
        $(and $field:ident: $type:ty)?
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $scripts {
            $(pub(crate) $script: $crate::backend::redis::scripts::LuaScript,)+
            $(pub(crate) $field: $type,)?
        }

        impl $scripts {
            pub(super) fn new() -> Self {
                Self {
                    $($script: $crate::backend::redis::scripts::LuaScript::new(concat!(
                        $($(include_str!(
                            concat!(env!("CARGO_MANIFEST_DIR"), "/lua/includes/", stringify!($include), ".lua")
                        ),)+)?
                        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/lua/", $file)),
                    )),)+
                    $($field: Default::default(),)?
                }
            }

            #[cfg(test)]
            pub(super) fn each_mut(&mut self) -> impl Iterator<Item = &mut $crate::backend::redis::scripts::LuaScript> {
                [$(&mut self.$script),+].into_iter()
            }
        }
    };
}

pub(super) use scripts;

/// The reply of a script whose writes may have to reach replicas.
pub(crate) enum Reply {
    /// Enough replicas have the writes, or the call needed none: it granted nothing, or requires no replication.
    Replied(Value),
    /// Only this number of replicas have the writes.
    Insufficient(u32),
}

impl LuaScript {
    pub(crate) fn new(code: &str) -> Self {
        Self { code: code.to_owned(), hash: Script::new(code).get_hash().to_owned() }
    }

    #[cfg(test)]
    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// Runs the script by its hash, or by its text if the server does not know it. That is so after a restart, a failover, a move of its
    /// slot or `SCRIPT FLUSH`. NOSCRIPT means that the server has done nothing, so the script never runs twice.
    pub(crate) async fn run(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: &impl ToRedisArgs,
    ) -> Result<Value, RedisError> {
        self.run_with_timeout(servers, keys, args, None).await
    }

    /// As [`run`](Self::run), with a response timeout other than the connection's.
    pub(super) async fn run_with_timeout(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: &impl ToRedisArgs,
        timeout: Option<Duration>,
    ) -> Result<Value, RedisError> {
        // All keys of a script are in one slot.
        let key = keys.first().copied().unwrap_or_default();
        match servers.exchange(key, &command("EVALSHA", &self.hash, keys, args), timeout).await {
            Err(error) if error::is_no_script(&error) => {
                servers.exchange(key, &command("EVAL", &self.code, keys, args), timeout).await
            }
            reply => reply,
        }
    }

    /// As [`run`](Self::run), and waits until replicas have the writes of the script if `is_granted` is true for its reply.
    pub(super) async fn call_replicated(
        &self,
        way: Delivery<'_>,
        keys: &[&str],
        args: impl ToRedisArgs,
        is_granted: fn(&Value) -> bool,
    ) -> Result<Reply, StoreError> {
        let key = keys.first().copied().unwrap_or_default();
        let answer = match way.exchange(key, &command("EVALSHA", &self.hash, keys, &args), is_granted).await {
            Err(error) if error::is_no_script(&error) => {
                way.exchange(key, &command("EVAL", &self.code, keys, &args), is_granted).await
            }
            answer => answer,
        };
        match answer.map_err(error::store_error)? {
            Outcome::Replied(reply) => Ok(Reply::Replied(reply)),
            Outcome::Insufficient(replicas) => Ok(Reply::Insufficient(replicas)),
            Outcome::Indeterminate(error) => match error::store_error(error) {
                error if error.is_timeout() || error.is_unavailable() => Err(error),
                // No refusal, whatever the error says: the lease was granted.
                error => Err(StoreError::other(error)),
            },
        }
    }

    /// Runs the script by its hash, and checks that EVAL is permitted too, for a server that forgets the script.
    pub(crate) async fn run_and_verify(
        &self,
        servers: &Servers,
        key: &str,
        args: &impl ToRedisArgs,
    ) -> Result<Value, RedisError> {
        let keys = &[key];
        match servers.exchange(key, &command("EVALSHA", &self.hash, keys, args), None).await {
            Ok(reply) => servers.exchange(key, &command("EVAL", "", keys, args), None).await.map(|_| reply),
            Err(error) if error::is_no_script(&error) => {
                servers.exchange(key, &command("EVAL", &self.code, keys, args), None).await
            }
            Err(error) => Err(error),
        }
    }

    /// As [`run`](Self::run), with the error as a [`StoreError`].
    pub(super) async fn call(
        &self,
        servers: &Servers,
        keys: &[&str],
        args: impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        self.run(servers, keys, &args).await.map_err(error::store_error)
    }

    /// The call as a command for a pipeline. It has the text of the script, because a pipeline cannot repeat the call after NOSCRIPT.
    pub(super) fn eval(&self, keys: &[&str], args: &impl ToRedisArgs) -> Cmd {
        command("EVAL", &self.code, keys, args)
    }
}

fn command(verb: &str, script: &str, keys: &[&str], args: &impl ToRedisArgs) -> Cmd {
    let bytes = verb.len() + script.len() + keys.iter().map(|key| key.len()).sum::<usize>() + 192;
    let mut command = Cmd::with_capacity(10 + keys.len(), bytes);
    command.arg(verb).arg(script).arg(keys.len());
    for key in keys {
        command.arg(key);
    }
    command.arg(args);
    command
}

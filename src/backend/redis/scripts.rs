//! The scripts, and one typed call for each.

use redis::{Cmd, Script, ToRedisArgs, Value};

use super::error;
use super::pool::Pool;
use crate::error::StoreError;
use crate::rate_limit::Quota;

/// A Lua script and its hash, which is what Redis knows it by.
#[derive(Debug)]
pub(super) struct LuaScript {
    code: String,
    hash: String,
}

macro_rules! lua {
    ($file:literal) => {
        LuaScript::new(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/lua/", $file)))
    };
}

/// All scripts, ready to run.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) fixed_window: LuaScript,
    pub(super) sliding_log: LuaScript,
}

/// What is charged, or with `peek` only asked.
#[derive(Clone, Copy)]
pub(super) struct Charge {
    pub(super) cost: u32,
    pub(super) peek: bool,
}

/// What both scripts of the rate limit answer.
#[derive(Clone, Copy)]
pub(super) struct Charged {
    pub(super) admitted: bool,
    pub(super) remaining: u32,
    pub(super) retry_us: u64,
    pub(super) reset_us: u64,
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self { fixed_window: lua!("rate_limit_fixed_window.lua"), sliding_log: lua!("rate_limit_sliding_log.lua") }
    }

    pub(super) async fn rate_limit_fixed_window(
        &self,
        pool: &Pool,
        window: &str,
        quota: Quota,
        Charge { cost, peek }: Charge,
    ) -> Result<Charged, StoreError> {
        let args = (quota.limit(), quota.window_ms(), cost, u8::from(peek));
        charged(self.fixed_window.call(pool, [window], args).await?)
    }

    pub(super) async fn rate_limit_sliding_log(
        &self,
        pool: &Pool,
        log: &str,
        quota: Quota,
        Charge { cost, peek }: Charge,
    ) -> Result<Charged, StoreError> {
        let args = (quota.limit(), quota.window_us(), cost, u8::from(peek));
        charged(self.sliding_log.call(pool, [log], args).await?)
    }
}

/// Reads `{admitted, remaining, retry_us, reset_us}`.
fn charged(reply: Value) -> Result<Charged, StoreError> {
    let fields = match &reply {
        Value::Array(fields) => fields.as_slice(),
        _ => &[],
    };
    if let [Value::Int(admitted), Value::Int(remaining), Value::Int(retry_us), Value::Int(reset_us)] = *fields
        && let (Ok(remaining), Ok(retry_us), Ok(reset_us)) =
            (remaining.try_into(), retry_us.try_into(), reset_us.try_into())
    {
        return Ok(Charged { admitted: admitted == 1, remaining, retry_us, reset_us });
    }
    Err(error::unexpected_reply(&reply))
}

impl LuaScript {
    pub(super) fn new(code: &str) -> Self {
        Self { code: code.to_owned(), hash: Script::new(code).get_hash().to_owned() }
    }

    #[cfg(test)]
    pub(super) fn code(&self) -> &str {
        &self.code
    }

    /// Runs the script by its hash, and by its text where the server does not know it: after a restart, a failover or
    /// `SCRIPT FLUSH`. A server that answers NOSCRIPT has done nothing, so nothing happens twice.
    async fn call<const N: usize>(
        &self,
        pool: &Pool,
        keys: [&str; N],
        args: impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        let reply = pool.send(&command("EVALSHA", &self.hash, keys, &args)).await;
        match reply {
            Err(error) if error::is_no_script(&error) => {
                pool.send(&command("EVAL", &self.code, keys, &args)).await.map_err(error::store_error)
            }
            reply => reply.map_err(error::store_error),
        }
    }
}

fn command<const N: usize>(verb: &str, script: &str, keys: [&str; N], args: &impl ToRedisArgs) -> Cmd {
    let bytes = verb.len() + script.len() + keys.iter().map(|key| key.len()).sum::<usize>() + 64;
    let mut command = Cmd::with_capacity(8 + N, bytes);
    command.arg(verb).arg(script).arg(N);
    for key in keys {
        command.arg(key);
    }
    command.arg(args);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words behind `KEYS[1]`, `ARGV[1]` and so on in the header of a script.
    fn declared(header: &str, what: &str) -> Vec<String> {
        let names = (1..).map_while(|i| {
            let tag = format!("-- {what}[{i}]");
            let line = header.lines().find_map(|line| line.strip_prefix(&tag))?;
            line.split_whitespace().next().map(str::to_owned)
        });
        names.collect()
    }

    /// How many of `KEYS` or `ARGV` the body reads.
    fn read(body: &str, what: &str) -> usize {
        (1..).take_while(|i| body.contains(&format!("{what}[{i}]"))).count()
    }

    #[test]
    fn headers_agree_with_bodies_and_calls() {
        let scripts = Scripts::new();
        // How many keys and arguments the typed calls above give.
        for (script, keys, args) in [(&scripts.fixed_window, 1, 4), (&scripts.sliding_log, 1, 4)] {
            let (header, body) = script.code.split_at(script.code.find("\nlocal ").unwrap());
            for (what, count) in [("KEYS", keys), ("ARGV", args)] {
                let names = declared(header, what);
                assert_eq!(names.len(), count, "{what} in the header");
                assert_eq!(read(body, what), count, "{what} in the body");
                for name in names {
                    assert!(body.contains(&name), "the body names {name} as the header does");
                }
            }
            for word in ["Value ", "Returns ", "Errors ", "Repeat "] {
                assert!(header.contains(&format!("-- {word}")), "the header states {word}");
            }
        }
    }

    #[test]
    fn a_call_is_one_command_with_all_arguments() {
        let command = command("EVALSHA", "abc", ["key"], &(5_u32, 60_000_000_u64, 1_u32, 0_u8));
        let packed = String::from_utf8(command.get_packed_command()).unwrap();
        let words: Vec<_> = packed.split("\r\n").filter(|word| !word.starts_with(['*', '$'])).collect();
        assert_eq!(words, ["EVALSHA", "abc", "1", "key", "5", "60000000", "1", "0", ""]);
    }
}

//! The Lua scripts, with a typed call for each.

mod cache;
mod delay_queue;
mod exists_filter;
mod idempotency;
pub(crate) mod lock;
mod lua_script;
pub(crate) mod rate_limit;

use self::cache::CacheScripts;
use self::delay_queue::DelayQueueScripts;
use self::exists_filter::ExistsFilterScripts;
use self::idempotency::IdempotencyScripts;
use self::lock::LockScripts;
use self::lua_script::scripts;
pub(crate) use self::lua_script::{LuaScript, Reply};
use self::rate_limit::RateLimitScripts;

/// All scripts.
#[derive(Debug)]
pub(crate) struct Scripts {
    pub(crate) rate_limit: RateLimitScripts,
    pub(crate) lock: LockScripts,
    pub(crate) idempotency: IdempotencyScripts,
    pub(crate) delay_queue: DelayQueueScripts,
    pub(crate) cache: CacheScripts,
    pub(crate) exists_filter: ExistsFilterScripts,
    pub(crate) server: ServerScripts,
}

scripts! {
    /// The script that checks the permissions of the user.
    pub(crate) struct ServerScripts {
        probe: "server_probe.lua";
    }
}

impl Scripts {
    pub(crate) fn new() -> Self {
        Self {
            rate_limit: RateLimitScripts::new(),
            lock: LockScripts::new(),
            idempotency: IdempotencyScripts::new(),
            delay_queue: DelayQueueScripts::new(),
            cache: CacheScripts::new(),
            exists_filter: ExistsFilterScripts::new(),
            server: ServerScripts::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn each_mut(&mut self) -> impl Iterator<Item = &mut LuaScript> {
        let Self { rate_limit, lock, idempotency, delay_queue, cache, exists_filter, server } = self;
        let capabilities = rate_limit.each_mut().chain(lock.each_mut()).chain(idempotency.each_mut());
        let capabilities =
            capabilities.chain(delay_queue.each_mut()).chain(cache.each_mut()).chain(exists_filter.each_mut());
        capabilities.chain(server.each_mut())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use redis::Script;

    use super::*;

    /// The names after `KEYS[1]`, `ARGV[1]` and so on in the headers of a script and its includes.
    fn declared(header: &str, what: &str) -> Vec<String> {
        let names = (1..).map_while(|i| {
            let tag = format!("-- {what}[{i}]");
            let line = header.lines().find_map(|line| line.strip_prefix(&tag))?;
            line.split_whitespace().next().map(str::to_owned)
        });
        names.collect()
    }

    #[test]
    fn headers_agree_with_bodies_and_calls() {
        let mut scripts = Scripts::new();
        let count = scripts.each_mut().count();
        // The number of keys and arguments of the typed calls of the modules, for one descriptor or lease.
        let calls = [
            (&scripts.rate_limit.check, 1, 10),
            (&scripts.rate_limit.check_plain, 1, 1),
            (&scripts.rate_limit.check_many, 1, 1),
            (&scripts.rate_limit.block, 1, 3),
            (&scripts.server.probe, 1, 1),
            (&scripts.lock.acquire, 1, 1),
            (&scripts.lock.acquire_all, 1, 5),
            (&scripts.lock.exchange, 1, 5),
            (&scripts.lock.queue, 4, 10),
            (&scripts.lock.renew, 1, 2),
            (&scripts.lock.release, 3, 4),
            (&scripts.lock.inspect, 2, 1),
            (&scripts.lock.name, 2, 2),
            (&scripts.lock.force_release, 1, 4),
            (&scripts.idempotency.begin, 2, 6),
            (&scripts.idempotency.renew, 1, 5),
            (&scripts.idempotency.complete, 1, 7),
            (&scripts.idempotency.release, 2, 5),
            (&scripts.idempotency.inspect, 1, 1),
            (&scripts.idempotency.forget, 1, 5),
            (&scripts.idempotency.complete_unknown, 1, 7),
            (&scripts.cache.claim, 2, 3),
            (&scripts.cache.renew, 1, 2),
            (&scripts.cache.put, 2, 10),
            (&scripts.cache.release, 2, 5),
            (&scripts.cache.invalidate, 2, 3),
            (&scripts.cache.generation, 1, 2),
            (&scripts.exists_filter.allocate, 1, 4),
            (&scripts.exists_filter.begin, 3, 3),
            (&scripts.exists_filter.add, 3, 6),
            (&scripts.exists_filter.end, 3, 5),
            (&scripts.delay_queue.push, 8, 6),
            (&scripts.delay_queue.claim, 12, 11),
            (&scripts.delay_queue.extend, 3, 3),
            (&scripts.delay_queue.get, 12, 4),
            (&scripts.delay_queue.cancel, 12, 5),
            (&scripts.delay_queue.reschedule, 12, 5),
            (&scripts.delay_queue.replace, 12, 5),
            (&scripts.delay_queue.counts, 12, 3),
            (&scripts.delay_queue.list, 12, 6),
            (&scripts.delay_queue.pause, 12, 4),
            (&scripts.delay_queue.purge, 12, 5),
            (&scripts.delay_queue.release_unique, 12, 4),
            (&scripts.delay_queue.replay, 12, 4),
            (&scripts.delay_queue.forget, 12, 4),
        ];
        assert_eq!(calls.len(), count);
        for (script, keys, args) in calls {
            let (comments, code): (Vec<_>, Vec<_>) = script.code().lines().partition(|line| line.starts_with("--"));
            let (header, body) = (comments.join("\n"), code.join("\n"));
            for (what, count) in [("KEYS", keys), ("ARGV", args)] {
                let names = declared(&header, what);
                assert_eq!(names.len(), count, "{what} in the header");
                assert!(
                    !body.contains(&format!("{what}[{}]", count + 1)),
                    "the body uses a {what} that is not in the header"
                );
                for name in names {
                    assert!(body.contains(&name), "the body does not use {name} of the header");
                }
            }
            for word in ["Value ", "Returns ", "Errors ", "Repeat "] {
                assert!(header.contains(&format!("-- {word}")), "the header has no line {word}");
            }
        }
    }

    #[test]
    fn scripts_follow_the_includes_of_their_headers() {
        let lua = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua");
        let read = |path: PathBuf| fs::read_to_string(path).unwrap();
        let scripts = format!("{:?}", Scripts::new());
        for entry in fs::read_dir(&lua).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                continue;
            }
            let script = read(path);
            let includes =
                script.lines().filter_map(|line| line.strip_prefix("-- Includes ")).flat_map(|names| names.split(", "));
            let mut joined: String = includes.map(|name| read(lua.join(format!("includes/{name}.lua")))).collect();
            joined += &script;
            assert!(scripts.contains(Script::new(&joined).get_hash()), "no script is {joined}");
        }
    }
}

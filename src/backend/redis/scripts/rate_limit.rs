//! The scripts of rate limits.

use redis::{RedisWrite, ToRedisArgs, Value};
use smallvec::SmallVec;

use super::lua_script::scripts;
use crate::backend::redis::codec::rate_limit::EncodedLimits;
use crate::backend::redis::topology::Servers;
use crate::error::StoreError;
use crate::rate_limit::Receipt;

scripts! {
    /// The scripts of rate limits.
    pub(crate) struct RateLimitScripts {
        check: "rate_limit_check.lua" after rate_limit_refill rate_limit_fade;
        check_plain: "rate_limit_check_plain.lua" after rate_limit_refill rate_limit_fade;
        check_many: "rate_limit_check_many.lua" after rate_limit_refill rate_limit_fade;
        block: "rate_limit_block.lua";
    }
}

/// How a call uses the counts.
#[derive(Clone, Copy)]
pub(crate) enum CheckMode {
    Check,
    Peek,
    Settle(Receipt),
}

/// A descriptor: see the header of `rate_limit_check.lua`.
pub(crate) struct Descriptor<'a> {
    pub(crate) keys: &'a [String],
    pub(crate) cost: i64,
    pub(crate) quota_change: &'static str,
    pub(crate) limits: &'a EncodedLimits,
}

impl ToRedisArgs for Descriptor<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        self.cost.write_redis_args(out);
        out.write_arg(self.quota_change.as_bytes());
        let EncodedLimits { limits, params, layout, ttl_ms, .. } = self.limits;
        ttl_ms.write_redis_args(out);
        out.write_arg(params);
        out.write_arg(layout.as_bytes());
        out.write_arg(limits);
    }

    fn num_of_args(&self) -> usize {
        6
    }
}

/// The descriptors of one policy: see the header of `rate_limit_check_many.lua`.
pub(crate) struct Group<'a> {
    pub(crate) limits: &'a EncodedLimits,
    pub(crate) costs: SmallVec<[u64; 64]>,
}

impl ToRedisArgs for Group<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        let EncodedLimits { params, limits, format, ttl_ms, .. } = self.limits;
        let mut head = SmallVec::<[u8; 8 + 7 * 64]>::new();
        head.extend_from_slice(&ttl_ms.to_le_bytes()[..6]);
        head.extend_from_slice(&(self.costs.len() as u16).to_le_bytes());
        if self.costs.iter().any(|cost| *cost != 1) {
            self.costs.iter().for_each(|cost| head.extend_from_slice(&cost.to_le_bytes()[..7]));
        }
        out.write_arg(&head);
        out.write_arg(params);
        out.write_arg(limits);
        out.write_arg(format.as_bytes());
    }

    fn num_of_args(&self) -> usize {
        4
    }
}

impl RateLimitScripts {
    pub(crate) async fn check(
        &self,
        servers: &Servers,
        mode: CheckMode,
        descriptors: &[Descriptor<'_>],
    ) -> Result<Value, StoreError> {
        let keys: SmallVec<[&str; 4]> =
            descriptors.iter().flat_map(|descriptor| descriptor.keys.iter().map(String::as_str)).collect();
        match mode {
            CheckMode::Check => self.check.call(servers, &keys, ("check", descriptors)).await,
            CheckMode::Peek => self.check.call(servers, &keys, ("peek", descriptors)).await,
            CheckMode::Settle(receipt) => {
                let missing: Vec<u64> = receipt.missing().take(Receipt::BUCKETS).collect();
                self.check.call(servers, &keys, ("settle", descriptors, receipt.as_micros(), missing)).await
            }
        }
    }

    /// Charges a descriptor without sliding logs. An empty reply means that nothing was changed, and that the caller has to use
    /// [`check`](Self::check).
    pub(crate) async fn check_plain(
        &self,
        servers: &Servers,
        key: &str,
        cost: u64,
        encoded: &EncodedLimits,
    ) -> Result<Value, StoreError> {
        let EncodedLimits { params, limits, counts_len, ttl_ms, .. } = encoded;
        let mut request = SmallVec::<[u8; 160]>::new();
        request.extend_from_slice(&cost.to_le_bytes()[..7]);
        request.extend_from_slice(&ttl_ms.to_le_bytes()[..6]);
        for length in [limits.len() + counts_len, limits.len()] {
            request.extend_from_slice(&(length as u16).to_le_bytes());
        }
        request.extend_from_slice(params);
        request.extend_from_slice(limits);
        self.check_plain.call(servers, &[key], &*request).await
    }

    pub(crate) async fn block(
        &self,
        servers: &Servers,
        counts: &str,
        block_us: u64,
        encoded: &EncodedLimits,
    ) -> Result<(), StoreError> {
        self.block.call(servers, &[counts], (block_us, encoded.ttl_ms, &*encoded.limits)).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::scripts::LuaScript;

    #[test]
    fn call_is_one_command_with_all_arguments() {
        let limits = EncodedLimits {
            params: b"params".to_vec(),
            limits: b"limits".to_vec(),
            layout: "<d".into(),
            format: "c6<d".into(),
            counts_len: 8,
            ttl_ms: 60_000,
        };
        let descriptor = Descriptor { keys: &[], cost: 5, quota_change: "keep", limits: &limits };
        let command = LuaScript::new("return 1").eval(&["key"], &("check", &[descriptor]));
        let command = String::from_utf8(command.get_packed_command()).unwrap();
        let words: Vec<_> = command.split("\r\n").filter(|word| !word.starts_with(['*', '$'])).collect();
        assert_eq!(
            words,
            ["EVAL", "return 1", "1", "key", "check", "5", "keep", "60000", "params", "<d", "limits", ""]
        );
    }
}

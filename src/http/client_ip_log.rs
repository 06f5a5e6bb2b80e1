//! What [`ClientIp`](super::ClientIp) logs and counts.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::http::header::{FORWARDED, HeaderMap, HeaderValue};
use tokio::time::Instant;

use super::client_ip::{ForwardingHeader, X_FORWARDED_FOR};

/// The warnings that an extractor or a clone of it has given.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) no_peer: Flag,
    ignored: Flag,
    another: Flag,
    private: Flag,
    unreadable: OncePerMinute,
}

#[derive(Debug, Default)]
pub(super) struct Flag(AtomicBool);

impl Flag {
    pub(super) fn first(&self) -> bool {
        !self.is_up() && !self.0.swap(true, Ordering::Relaxed)
    }

    fn is_up(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Told {
    pub(super) fn of_ignored(&self, peer: IpAddr, headers: &HeaderMap, read: &ForwardingHeader) {
        if self.ignored.is_up() {
            return;
        }
        let header = [read.name(), &X_FORWARDED_FOR, &FORWARDED].into_iter().find(|name| headers.contains_key(*name));
        if let Some(header) = header
            && self.ignored.first()
        {
            tracing::warn!(
                %peer, %header,
                "ClientIp ignores a forwarding header, as the peer is not a trusted proxy: if the peer is a proxy of yours, \
                 name its network in `ClientIp::trusting`, or all its clients count as one; if not, a client sent the header \
                 by itself, and nothing is wrong"
            );
        }
    }

    pub(super) fn of_another(&self, headers: &HeaderMap, read: &ForwardingHeader) {
        if self.another.is_up() || headers.contains_key(read.name()) {
            return;
        }
        let header = [&X_FORWARDED_FOR, &FORWARDED].into_iter().find(|name| headers.contains_key(*name));
        if let Some(header) = header
            && self.another.first()
        {
            tracing::warn!(
                %header, read = %read.name(),
                "a trusted proxy forwards another header than the one that ClientIp reads, so its clients count as one: if \
                 the proxy writes that header, choose it with `ClientIp::header`; do not if it only passes through what \
                 clients send"
            );
        }
    }

    pub(super) fn of_private(&self, client: IpAddr) {
        if self.private.first() {
            tracing::warn!(
                %client,
                "ClientIp finds a client with a private address behind a trusted proxy: most likely that is one more proxy, \
                 whose network is missing in `ClientIp::trusting`, or which is missing in the number for `ClientIp::trusting_hops`, \
                 and all its clients count as one"
            );
        }
    }

    pub(super) fn of_unreadable(&self, proxy: IpAddr, headers: &HeaderMap, read: &ForwardingHeader) {
        let header = read.name();
        #[cfg(feature = "metrics")]
        ::metrics::counter!("tollgate_unreadable_client_addresses_total", "header" => header.as_str().to_owned())
            .increment(1);
        if self.unreadable.is_due() {
            let value = headers.get_all(header).iter().next_back().map_or(&[][..], HeaderValue::as_bytes);
            let value = value[value.len().saturating_sub(MAX_LOGGED)..].escape_ascii();
            tracing::warn!(
                %proxy, %header, %value,
                "ClientIp cannot read the address in a header of a trusted proxy: check that the proxy writes this header, and in \
                 which form; `ForwardingHeader::SingleWithPort` reads an address that always has a port, and \
                 `ClientIp::on_unreadable` says how such requests count"
            );
        }
    }
}

/// How much of a value is logged, in bytes: the end of it, which the last proxy wrote.
const MAX_LOGGED: usize = 64;

/// Says yes once, and again when a minute has passed since then.
#[derive(Debug, Default)]
struct OncePerMinute(Mutex<Option<Instant>>);

impl OncePerMinute {
    fn is_due(&self) -> bool {
        // If another thread holds it, that thread answers for both.
        let Ok(mut last) = self.0.try_lock() else { return false };
        let now = Instant::now();
        let is_due = last.is_none_or(|last| now.duration_since(last) >= Duration::from_secs(60));
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

//! Logs and metrics of [`ClientIp`](super::ClientIp).

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::http::header::{FORWARDED, HeaderMap, HeaderValue};
use tokio::time::Instant;

use super::forwarding_header::{ForwardingHeader, X_FORWARDED_FOR};

/// The warnings that an extractor and its clones have logged.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    pub(super) no_peer: Flag,
    ignored: Flag,
    other: Flag,
    private: Flag,
    unreadable: OncePerMinute,
}

#[derive(Debug, Default)]
pub(super) struct Flag(AtomicBool);

impl Flag {
    /// Sets the flag, and returns true if it was not set before.
    pub(super) fn set(&self) -> bool {
        !self.is_set() && !self.0.swap(true, Ordering::Relaxed)
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Warnings {
    pub(super) fn ignored_header(&self, peer: IpAddr, headers: &HeaderMap, read: &ForwardingHeader) {
        if self.ignored.is_set() {
            return;
        }
        let header = [read.name(), &X_FORWARDED_FOR, &FORWARDED].into_iter().find(|name| headers.contains_key(*name));
        if let Some(header) = header
            && self.ignored.set()
        {
            tracing::warn!(
                %peer, %header,
                "ClientIp ignores a forwarding header because the peer is not a trusted proxy: if the peer is your proxy, \
                 add its network to `ClientIp::trusting`, or all its clients share one key; otherwise a client sent the \
                 header, and nothing is wrong"
            );
        }
    }

    pub(super) fn other_header(&self, headers: &HeaderMap, read: &ForwardingHeader) {
        if self.other.is_set() || headers.contains_key(read.name()) {
            return;
        }
        let header = [&X_FORWARDED_FOR, &FORWARDED].into_iter().find(|name| headers.contains_key(*name));
        if let Some(header) = header
            && self.other.set()
        {
            tracing::warn!(
                %header, read = %read.name(),
                "a trusted proxy sends a different header from the one that ClientIp reads, so its clients share one key: if \
                 the proxy writes that header, set it with `ClientIp::header`; do not if the proxy only passes on the header \
                 of the client"
            );
        }
    }

    pub(super) fn private_client(&self, client: IpAddr) {
        if self.private.set() {
            tracing::warn!(
                %client,
                "ClientIp finds a client with a private address behind a trusted proxy: if this is another proxy, all its clients \
                 share one key; add its network to `ClientIp::trusting`, or count it in `ClientIp::trusting_hops`, but never \
                 the network of Kubernetes nodes: for those set `externalTrafficPolicy: Local`"
            );
        }
    }

    pub(super) fn unreadable_header(&self, proxy: IpAddr, headers: &HeaderMap, read: &ForwardingHeader) {
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
                 `ClientIp::on_unreadable` sets the key of such requests"
            );
        }
    }
}

/// How many bytes of a value are logged. They come from its end, which the last proxy wrote.
const MAX_LOGGED: usize = 64;

/// Is due at most once per minute.
#[derive(Debug, Default)]
struct OncePerMinute(Mutex<Option<Instant>>);

impl OncePerMinute {
    fn is_due(&self) -> bool {
        // If another thread holds the mutex, that thread logs the warning.
        let Ok(mut last) = self.0.try_lock() else { return false };
        let now = Instant::now();
        let is_due = last.is_none_or(|last| now.duration_since(last) >= Duration::from_secs(60));
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

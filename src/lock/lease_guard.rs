//! The lease of a request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::error::Lost;
use super::layer_options::OnLoss;
use super::lease::Lease;

/// Keeps the lock of a request until it is dropped.
pub struct LeaseGuard {
    // Dropped before the lease: the loss is meaningless after the release.
    loss: Option<Pin<Box<dyn Future<Output = Lost> + Send>>>,
    lease: Lease,
}

impl LeaseGuard {
    pub(super) fn new(lease: Lease, on_loss: OnLoss) -> Self {
        let loss = (on_loss == OnLoss::Cancel).then(|| Box::pin(lease.loss()) as _);
        Self { loss, lease }
    }

    /// The lease.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Resolves when the lease is lost and the request is to be [cancelled](OnLoss::Cancel). Do not poll again after that.
    pub fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<Lost> {
        let Some(loss) = &mut self.loss else { return Poll::Pending };
        loss.as_mut().poll(cx)
    }
}

impl fmt::Debug for LeaseGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGuard").field("lease", &self.lease).finish_non_exhaustive()
    }
}

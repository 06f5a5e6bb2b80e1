//! How many units a request costs.

/// How many units a request costs.
///
/// Closures `Fn(&Req) -> u64` are costs. A request with a cost of 0 passes without a charge and does not [wait](super::RateLimitLayer::wait) for
/// room. It also passes while the store fails. It is rejected if the quota is 0, and while its key is known to be
/// [blocked](crate::Limiter::block).
pub trait RequestCost<Req> {
    /// Returns the cost of this request.
    fn cost(&self, request: &Req) -> u64;
}

impl<Req, F: Fn(&Req) -> u64> RequestCost<Req> for F {
    fn cost(&self, request: &Req) -> u64 {
        self(request)
    }
}

/// Every request costs one unit. The default of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnitCost;

impl<Req> RequestCost<Req> for UnitCost {
    fn cost(&self, _: &Req) -> u64 {
        1
    }
}

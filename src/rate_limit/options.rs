//! The options that are part of the type of a layer.

use std::fmt;
use std::sync::Arc;

use super::charge_on::ChargeAlways;
use super::cost::UnitCost;
use crate::responder::HttpResponder;

/// The options of a [`RateLimitLayer`](super::RateLimitLayer) that are part of its type: the [cost](super::RequestCost), the
/// [responder](crate::responder::Responder), which responses are [charged](super::ChargeOn), and the [filters](super::RequestFilter).
///
/// The methods of the layer make it. You need its name only to write down the type of a layer with such options.
pub struct LayerOptions<C = UnitCost, A = HttpResponder, R = ChargeAlways, X = ()> {
    pub(super) cost: Arc<C>,
    pub(super) responder: Arc<A>,
    pub(super) charge: Arc<R>,
    pub(super) filter: Arc<X>,
}

impl Default for LayerOptions {
    fn default() -> Self {
        Self { cost: Arc::default(), responder: Arc::default(), charge: Arc::default(), filter: Arc::default() }
    }
}

// Not derived: `derive` would require `C: Clone` and so on, but closures need not be `Clone`.
impl<C, A, R, X> Clone for LayerOptions<C, A, R, X> {
    fn clone(&self) -> Self {
        Self {
            cost: Arc::clone(&self.cost),
            responder: Arc::clone(&self.responder),
            charge: Arc::clone(&self.charge),
            filter: Arc::clone(&self.filter),
        }
    }
}

impl<C, A, R, X> fmt::Debug for LayerOptions<C, A, R, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerOptions").finish_non_exhaustive()
    }
}

impl<C, A, R, X> LayerOptions<C, A, R, X> {
    pub(super) fn cost<C2>(self, cost: C2) -> LayerOptions<C2, A, R, X> {
        let Self { cost: _, responder, charge, filter } = self;
        LayerOptions { cost: Arc::new(cost), responder, charge, filter }
    }

    pub(super) fn responder<A2>(self, responder: A2) -> LayerOptions<C, A2, R, X> {
        let Self { cost, responder: _, charge, filter } = self;
        LayerOptions { cost, responder: Arc::new(responder), charge, filter }
    }

    pub(super) fn charge<R2>(self, charge: R2) -> LayerOptions<C, A, R2, X> {
        let Self { cost, responder, charge: _, filter } = self;
        LayerOptions { cost, responder, charge: Arc::new(charge), filter }
    }

    pub(super) fn filter<X2>(self, make: impl FnOnce(Arc<X>) -> X2) -> LayerOptions<C, A, R, X2> {
        let Self { cost, responder, charge, filter } = self;
        LayerOptions { cost, responder, charge, filter: Arc::new(make(filter)) }
    }
}

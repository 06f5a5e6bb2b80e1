//! Evaluates a request in three phases: [`resolve`] finds the policies of its keys, [`decide`] gets a decision about each, and [`combine`]
//! turns the decisions into one result. If the store or the resolver fails, [`fallback`] decides instead.

mod combine;
mod decide;
mod fallback;
mod resolve;

use tracing::Instrument;

use super::descriptor::{Descriptor, DescriptorList, all_enforced_are_decided};
use super::layer_config::LayerConfig;
use super::rejection::Rejection;
use super::store::RateLimitStore;
use crate::error::StoreError;

/// The descriptors of a request with their decisions, and the result.
pub(super) struct Evaluation {
    pub(super) descriptors: DescriptorList,
    pub(super) result: Result<(), Rejection>,
}

impl<B: RateLimitStore + Sync> LayerConfig<B> {
    /// Evaluates a request that needs to wait for the resolver or the store.
    pub(super) async fn evaluate(&self, mut descriptors: DescriptorList, cost: u64) -> Evaluation {
        let queried = self.query(&mut descriptors, cost).await;
        self.finish(descriptors, cost, queried).await
    }

    /// Gets the decisions that the result depends on. The resolver and the store have the whole deadline each, so that a slow resolver
    /// causes no store error.
    pub(super) async fn query(&self, descriptors: &mut [Descriptor], cost: u64) -> Result<(), StoreError> {
        let span = tracing::debug_span!("rate_limit", policy = self.policy.name(), descriptors = descriptors.len());
        let query = async {
            self.resolve(descriptors).await?;
            self.decide(descriptors, cost).await
        };
        let queried = query.instrument(span).await;
        descriptors.iter_mut().for_each(|descriptor| descriptor.question = None);
        match queried {
            // Only shadow policies failed.
            Err(_) if all_enforced_are_decided(descriptors) => Ok(()),
            queried => queried,
        }
    }

    /// Turns the decisions, or the error, into a result.
    pub(super) async fn finish(
        &self,
        mut descriptors: DescriptorList,
        cost: u64,
        queried: Result<(), StoreError>,
    ) -> Evaluation {
        let result = match queried {
            Ok(()) => self.combine(&descriptors, cost),
            Err(error) => self.fallback(&mut descriptors, cost, error).await,
        };
        Evaluation { descriptors, result }
    }
}

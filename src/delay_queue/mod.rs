//! Jobs that run later, on time, and are never lost.

mod backoff;
mod codec;
mod error;
mod id;
mod job;
mod outcome;
mod push;
mod queue;
mod record;
mod store;

mod events;
mod worker;

mod erased;
mod meters;
mod runner;
mod running;
mod slots;
mod trace;

pub use self::backoff::Backoff;
pub use self::codec::{Codec, Json};
pub use self::error::QueueError;
pub use self::events::{Event, Events};
pub use self::id::JobId;
pub use self::job::{Cancellation, Extensions, Job};
pub use self::outcome::Outcome;
pub use self::push::{Push, Pushed};
pub use self::queue::DelayQueue;
pub use self::record::{Due, Headers, NewJob, Note, Priority, Reason, StoredJob, Unique, UniqueFor};
pub use self::store::{
    Admission, Cancelled, Changed, Claim, Claimed, ClaimedJob, Counts, DeadLimits, DelayQueueStore, Ending, Extended,
    Finish, Finished, MAX_BATCH, MAX_NOTE, QueueKey, State, Ticket, WorkerId,
};
pub use self::worker::{DelayQueueWorker, WorkerError};

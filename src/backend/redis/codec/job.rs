//! The encoding of jobs in Redis: see the headers of `lua/includes/delay_queue_keys.lua` and `lua/delay_queue_push.lua`.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::{RedisWrite, ToRedisArgs};

use super::millis::millis;
use crate::delay_queue::store::{Ack, AckKind, JobLease};
use crate::delay_queue::{
    Due, FailureInfo, Headers, JobId, NewJob, Priority, Reason, State, StoredJob, Unique, UniqueFor,
};
use crate::key::Key;

/// The bytes of a record before its unique key.
const HEADER_LEN: usize = 26;

/// How many jobs a run has: see `lua/includes/delay_queue_keys.lua`.
const RUN: usize = 16;

/// Jobs of one priority, as arguments of `delay_queue_push`.
pub(crate) struct PackedJobs<'a>(pub(crate) &'a [&'a NewJob]);

impl PackedJobs<'_> {
    /// Groups of consecutive jobs with the same due time: the number of jobs, negative for runs, and the due time.
    fn due_groups(&self) -> impl Iterator<Item = (i64, i64)> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let due = rest.first()?.due;
            let in_runs = rest.chunks_exact(RUN).take_while(|jobs| jobs[0].due == due && is_run(jobs)).count() * RUN;
            let is_single = |&i: &usize| rest[i].due == due && !rest.get(i..i + RUN).is_some_and(is_run);
            let len = if in_runs > 0 { in_runs } else { 1 + (1..rest.len()).take_while(is_single).count() };
            rest = &rest[len..];
            Some((if in_runs > 0 { -(len as i64) } else { len as i64 }, when(due)))
        })
    }

    /// The unique jobs, with their positions from 1.
    fn unique(&self) -> impl Iterator<Item = (usize, &Unique)> {
        self.0.iter().enumerate().filter_map(|(i, job)| Some((i + 1, job.unique.as_ref()?)))
    }
}

impl ToRedisArgs for PackedJobs<'_> {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        self.0.len().write_redis_args(out);
        let mut arg = Vec::new();
        for job in self.0 {
            out.write_arg(job.id.as_bytes());
            arg.clear();
            pack_record(job, &mut arg);
            out.write_arg(&arg);
        }
        for (len, when) in self.due_groups() {
            len.write_redis_args(out);
            when.write_redis_args(out);
        }
        for (position, unique) in self.unique() {
            position.write_redis_args(out);
            arg.clear();
            arg.extend_from_slice(&pack_span(unique.span).1);
            arg.extend_from_slice(unique.key.as_bytes());
            out.write_arg(&arg);
        }
    }

    fn num_of_args(&self) -> usize {
        1 + 2 * (self.0.len() + self.due_groups().count() + self.unique().count())
    }
}

/// Whether these jobs can be stored as a run.
fn is_run(jobs: &[&NewJob]) -> bool {
    let Some((stem, begin)) = jobs[0].id.digit().filter(|(_, digit)| digit % RUN == 0) else { return false };
    let (due, priority) = (jobs[0].due, Priority::Normal);
    let follows = |(i, job): (usize, &&NewJob)| {
        job.id.digit() == Some((stem, begin + i)) && (job.due, job.priority) == (due, priority)
    };
    jobs.iter().enumerate().all(follows)
}

/// Appends the part of a record after its times.
fn pack_record(job: &NewJob, out: &mut Vec<u8>) {
    let NewJob { priority, max_attempts, unique, headers, payload, .. } = job;
    let (kind, span) = unique.map_or((0, [0; 6]), |unique| pack_span(unique.span));
    let span = if kind & 3 == 3 { &span[..] } else { &[] };
    let key = unique.as_ref().map(|unique| unique.key.as_bytes()).unwrap_or_default();
    let headers_len = span.len() + headers.iter().map(|(name, value)| 8 + name.len() + value.len()).sum::<usize>();
    out.reserve(HEADER_LEN + key.len() + headers_len + payload.len());
    out.push(*priority as u8 | kind << 2);
    out.extend_from_slice(&max_attempts.to_be_bytes());
    // No attempt has ended, and there is no failure.
    out.extend_from_slice(&[0; 5]);
    out.push(key.len() as u8);
    out.extend_from_slice(&(headers_len as u32).to_be_bytes());
    out.extend_from_slice(key);
    out.extend_from_slice(span);
    for text in headers.iter().flat_map(|(name, value)| [name, value]) {
        out.extend_from_slice(&(text.len() as u32).to_be_bytes());
        out.extend_from_slice(text.as_bytes());
    }
    out.extend_from_slice(payload);
}

/// The kind of a unique key, and its time in ms if it has one.
fn pack_span(span: UniqueFor) -> (u8, [u8; 6]) {
    let (kind, ms) = match span {
        UniqueFor::WaitingOrRunning => (1, 0),
        UniqueFor::Waiting => (2, 0),
        UniqueFor::Time(time) => (3, millis(time.min(Due::MAX_DELAY)).max(1)),
        UniqueFor::Occurrence(time) => (7, millis(time.min(Due::MAX_DELAY)).max(1)),
    };
    let [_, _, bytes @ ..] = ms.to_be_bytes();
    (kind, bytes)
}

/// The due time as an argument of scripts: a delay in ms, or a negated instant in ms. Rounded up, so that no job is early.
pub(crate) fn when(due: Due) -> i64 {
    match due {
        Due::In(delay) => millis(delay.min(Due::MAX_DELAY)) as i64,
        Due::At(instant) => {
            let since = instant.duration_since(UNIX_EPOCH).unwrap_or_default();
            // The bound is in the year 10,680, which is beyond any instant in use.
            -(millis(since.min(Duration::from_secs(1 << 38))) as i64).max(1)
        }
    }
}

/// The lease as a member of the sorted set of leases.
pub(crate) fn pack_lease(lease: &JobLease) -> Vec<u8> {
    [&lease.token.to_be_bytes()[1..], lease.id.as_bytes()].concat()
}

/// Finished jobs as arguments of `delay_queue_claim`, and the positions of their results in its reply.
pub(crate) struct PackedFinishes {
    done: Vec<Vec<u8>>,
    others: Vec<OtherResult>,
    // The unique keys, each with the position of its job in `done`, from 1. Negative if the key is released even if its hold is timed.
    unique: Vec<(isize, Key)>,
    // The position of each result in the reply, in the order of the finished jobs.
    pub(crate) indexes: Vec<usize>,
}

struct OtherResult {
    lease: Vec<u8>,
    kind: u8,
    delay: u64,
    error: Arc<str>,
}

impl PackedFinishes {
    pub(crate) fn new(finishes: &[Ack]) -> Self {
        let all_done = finishes.iter().filter(|finish| finish.kind.forgets()).count();
        let mut packed = Self { done: Vec::new(), others: Vec::new(), unique: Vec::new(), indexes: Vec::new() };
        for Ack { lease, kind } in finishes {
            let (code, delay, error) = match kind {
                AckKind::Done | AckKind::Cancelled => {
                    packed.indexes.push(packed.done.len());
                    packed.done.push(pack_lease(lease));
                    if let Some(Unique { key, span }) = lease.unique {
                        let ends_time = *kind == AckKind::Cancelled && !matches!(span, UniqueFor::Occurrence(_));
                        let position = packed.done.len() as isize;
                        packed.unique.push((if ends_time { -position } else { position }, key));
                    }
                    continue;
                }
                AckKind::Retry { delay, error } => (1, millis(*delay), Arc::clone(error)),
                AckKind::Snooze { delay } => (2, millis(*delay), Arc::default()),
                AckKind::Release => (3, 0, Arc::default()),
                AckKind::Dead { reason, error } => (4, reason_code(*reason).into(), Arc::clone(error)),
            };
            let delay = delay.min(millis(Due::MAX_DELAY));
            packed.indexes.push(all_done + packed.others.len());
            packed.others.push(OtherResult { lease: pack_lease(lease), kind: code, delay, error });
        }
        packed
    }
}

impl ToRedisArgs for PackedFinishes {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        self.done.len().write_redis_args(out);
        self.others.len().write_redis_args(out);
        for lease in &self.done {
            out.write_arg(lease);
        }
        for OtherResult { lease, kind, delay, error } in &self.others {
            out.write_arg(lease);
            kind.write_redis_args(out);
            delay.write_redis_args(out);
            out.write_arg(FailureInfo::cut(error).as_bytes());
        }
        self.unique.len().write_redis_args(out);
        for (position, key) in &self.unique {
            position.write_redis_args(out);
            out.write_arg(key.as_bytes());
        }
    }

    fn num_of_args(&self) -> usize {
        3 + self.done.len() + 4 * self.others.len() + 2 * self.unique.len()
    }
}

const fn reason_code(reason: Reason) -> u8 {
    match reason {
        Reason::Failed => 1,
        Reason::LeaseExpired => 2,
        Reason::Refused => 3,
        Reason::Undecodable => 4,
    }
}

/// Decodes a stored record; `None` if it is not a job.
pub(crate) fn stored_job(id: &[u8], record: &[u8], state: State) -> Option<StoredJob> {
    let mut rest = Reader(record);
    let [1] = rest.array()? else { return None };
    let (enqueued, due) = (rest.number::<6>()?, rest.number::<6>()?);
    let [flags] = rest.array()?;
    let (max_attempts, spent) = (rest.number::<2>()? as u16, rest.number::<2>()? as u16);
    let [reason] = rest.array()?;
    let error_len = rest.number::<2>()? as usize;
    let [key_len] = rest.array()?;
    let headers_len = rest.number::<4>()? as usize;
    let key = rest.bytes(key_len.into())?;
    let error = String::from_utf8_lossy(rest.bytes(error_len)?);
    let mut span_and_headers = Reader(rest.bytes(headers_len)?);
    let span = match flags >> 2 {
        0 => None,
        1 => Some(UniqueFor::WaitingOrRunning),
        2 => Some(UniqueFor::Waiting),
        3 => Some(UniqueFor::Time(Duration::from_millis(span_and_headers.number::<6>()?))),
        7 => Some(UniqueFor::Occurrence(Duration::from_millis(span_and_headers.number::<6>()?))),
        _ => return None,
    };
    let unique = match span {
        Some(span) => Some(Unique { key: Key::stored(str::from_utf8(key).ok()?)?, span }),
        None => None,
    };
    let mut headers = Headers::new();
    while !span_and_headers.0.is_empty() {
        let (name, value) = (span_and_headers.text()?, span_and_headers.text()?);
        headers.insert(name, value);
    }
    let reason = match reason {
        0 => None,
        1 => Some(Reason::Failed),
        2 => Some(Reason::LeaseExpired),
        3 => Some(Reason::Refused),
        4 => Some(Reason::Undecodable),
        _ => return None,
    };
    Some(StoredJob {
        id: JobId::from_store(id)?,
        state,
        attempt: spent.saturating_add(u16::from(state == State::Running)),
        max_attempts,
        priority: *Priority::ALL.get(usize::from(flags & 3))?,
        enqueued_at: instant(enqueued),
        due_at: instant(due),
        unique,
        failure: reason.map(|reason| FailureInfo { reason, error: error.as_ref().into() }),
        headers,
        payload: rest.0.into(),
    })
}

fn instant(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn number<const N: usize>(&mut self) -> Option<u64> {
        Some(self.array::<N>()?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.number::<4>()?;
        str::from_utf8(self.bytes(len as usize)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delay_queue::UniqueIds;

    /// The record as the script completes it.
    fn record(job: &NewJob) -> Vec<u8> {
        let mut record = [&[1], &7_u64.to_be_bytes()[2..], &9_u64.to_be_bytes()[2..]].concat();
        pack_record(job, &mut record);
        record
    }

    #[test]
    fn job_round_trips_through_its_record() {
        let time = Duration::from_secs(7);
        let held = [UniqueFor::Time(time), UniqueFor::Occurrence(time)];
        for span in [UniqueFor::WaitingOrRunning, UniqueFor::Waiting].into_iter().chain(held) {
            let mut job = NewJob::new(JobId::from("a"), *b"\0payload");
            job.priority = Priority::Low;
            job.max_attempts = 300;
            job.unique = Some(Unique { key: "user".into(), span });
            job.headers.insert("traceparent", "00-1-2-3");
            job.headers.insert("", "");
            let stored = stored_job(b"a", &record(&job), State::Running).unwrap();
            assert_eq!(stored.enqueued_at, instant(7));
            assert_eq!(stored.due_at, instant(9));
            assert_eq!((stored.attempt, stored.max_attempts, stored.failure), (1, 300, None));
            assert_eq!((stored.id, stored.priority, stored.unique), (job.id, job.priority, job.unique));
            assert_eq!((stored.headers, stored.payload), (job.headers, job.payload));
        }
    }

    #[test]
    fn truncated_record_is_rejected() {
        let mut job = NewJob::new(JobId::from("a"), *b"");
        job.headers.insert("name", "value");
        let whole = record(&job);
        assert!(stored_job(b"a", &whole, State::Dead).is_some());
        for len in 0..whole.len() {
            assert!(stored_job(b"a", &whole[..len], State::Dead).is_none(), "{len} bytes");
        }
    }

    #[test]
    fn jobs_with_equal_due_times_are_grouped() {
        let mut jobs = [1, 1, 2, 1].map(|delay| {
            let due = Due::In(Duration::from_millis(delay));
            NewJob { due, ..NewJob::new(JobId::from("a"), *b"") }
        });
        jobs[3].unique = Some(Unique { key: "user".into(), span: UniqueFor::Waiting });
        let jobs: Vec<_> = jobs.iter().collect();
        let packed_jobs = PackedJobs(&jobs);
        let args = packed_jobs.to_redis_args();
        assert_eq!(args.len(), packed_jobs.num_of_args());
        assert_eq!(args[0], b"4");
        let texts: Vec<_> = args[9..].iter().map(|arg| str::from_utf8(arg).unwrap()).collect();
        assert_eq!(texts, ["2", "1", "1", "2", "1", "1", "4", "\0\0\0\0\0\0user"]);
    }

    #[test]
    fn consecutive_ids_form_runs() {
        let mut ids = UniqueIds::default();
        let mut jobs: Vec<_> = (0..64).map(|_| NewJob::new(ids.next().unwrap(), *b"")).collect();
        let due_groups = |jobs: &[NewJob]| {
            let jobs: Vec<_> = jobs.iter().collect();
            PackedJobs(&jobs).due_groups().map(|(len, _)| len).collect::<Vec<_>>()
        };
        assert_eq!(due_groups(&jobs), [-64]);
        assert_eq!(due_groups(&jobs[15..]), [1, -48]);
        assert_eq!(due_groups(&jobs[..40]), [-32, 8]);
        jobs[20].due = Due::In(Duration::from_millis(1));
        assert_eq!(due_groups(&jobs), [-16, 4, 1, 11, -32]);
        jobs[40].priority = Priority::Low;
        assert_eq!(due_groups(&jobs), [-16, 4, 1, 27, -16]);
        jobs.swap(0, 1);
        assert_eq!(due_groups(&jobs), [20, 1, 27, -16]);
        assert!(due_groups(&jobs[..0]).is_empty());
    }

    #[test]
    fn results_are_found_at_their_positions() {
        let finish = |name: &str, kind| Ack { lease: JobLease { id: JobId::from(name), token: 1, unique: None }, kind };
        let packed_finishes = PackedFinishes::new(&[
            finish("a", AckKind::Release),
            finish("b", AckKind::Done),
            finish("c", AckKind::Snooze { delay: Duration::ZERO }),
            finish("d", AckKind::Done),
        ]);
        assert_eq!(packed_finishes.indexes, [2, 0, 3, 1]);
    }

    #[test]
    fn times_are_rounded_up_and_bounded() {
        assert_eq!(when(Due::In(Duration::from_micros(1))), 1);
        assert_eq!(when(Due::In(Duration::MAX)), millis(Due::MAX_DELAY) as i64);
        assert_eq!(when(Due::At(UNIX_EPOCH)), -1);
        assert_eq!(when(Due::At(UNIX_EPOCH - Duration::from_secs(1))), -1);
        assert_eq!(when(Due::At(UNIX_EPOCH + Duration::from_micros(1_500))), -2);
    }
}

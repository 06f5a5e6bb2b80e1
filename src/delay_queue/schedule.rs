use std::error::Error;
use std::fmt;
use std::future::{Future, pending};
use std::iter::successors;
use std::mem;
use std::str::FromStr;
#[cfg(test)]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::{Duration, Instant as StdInstant, SystemTime};

use croner::Cron;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use tokio::time::{Instant, sleep};

use super::backoff::share;
use super::error::QueueError;
use super::id::JobId;
use super::push::Push;
use super::queue::DelayQueue;
use super::record::{Due, UniqueFor};
use super::store::{Cancelled, State};
use crate::codec::{Codec, Json};
use crate::error::ConfigError;

/// The largest supported clock difference between processes that push for a schedule or retire it.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(3_600);
/// A job is pushed at most this long before its time. Then its delay by the clock of the store, and the time for which its key is held, are
/// at most [`Due::MAX_DELAY`].
const MAX_PUSH_AHEAD: Duration = Due::MAX_DELAY.saturating_sub(Duration::from_secs(2 * 3_600));
/// The pause after a failed push. It doubles with each further failure up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The longest sleep, after which the scheduler checks whether the machine was suspended or its clock was set.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// If the clock is set back by no more than this, it was corrected: the scheduler does not go back to earlier times.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);
/// Up to how many skipped times are counted.
const MAX_COUNTED: usize = 1_000;

/// A recurring schedule: a cron pattern in a time zone.
///
/// On a day when clocks change, a pattern with a single time of day, without lists, steps and ranges, fires once. If its time occurs twice,
/// it fires at the first. If its time is skipped, it fires at the end of the skipped hour. If that is midnight, it is on the next day, so the
/// pattern fires only if that day matches, too.
///
/// Any other pattern, with a list or a step such as `0,30 2 * * *`, follows the clock: on such a day its times come twice or not at all. To
/// have them come once, use two schedules with one time each.
///
/// ```
/// use tollgate::delay_queue::Schedule;
///
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// // At 02:30, which comes twice or never when clocks change. As the only time of the day it still comes once.
/// let nightly = Schedule::cron("nightly", "30 2 * * *")?.time_zone("Europe/Berlin")?;
/// let every_ten_seconds = Schedule::cron("tick", "*/10 * * * * *")?; // six fields begin with seconds
/// assert!(Schedule::cron("wrong", "61 * * * *").is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    name: String,
    pattern: Cron,
    zone: TimeZone,
}

impl Schedule {
    /// The schedule `name` with the cron `pattern`: minute, hour, day of the month, month and day of the week, with seconds before them if there
    /// are six fields. The time zone defaults to UTC: see [`time_zone`](Self::time_zone). The name has to be unique within the queue.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSchedule`].
    pub fn cron(name: impl Into<String>, pattern: &str) -> Result<Self, ConfigError> {
        let pattern = Cron::from_str(pattern).map_err(|error| invalid(&error))?;
        Ok(Self { name: name.into(), pattern, zone: TimeZone::UTC })
    }

    /// The time zone, by its name in the [IANA database](https://www.iana.org/time-zones). Defaults to UTC.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSchedule`] if there is no such zone.
    pub fn time_zone(self, name: &str) -> Result<Self, ConfigError> {
        let zone = TimeZone::get(name).map_err(|error| invalid(&error))?;
        Ok(Self { zone, ..self })
    }

    /// The first time of the schedule after `time`; `None` if there is none.
    #[must_use]
    pub fn next_after(&self, time: SystemTime) -> Option<SystemTime> {
        let from = Zoned::new(Timestamp::try_from(time).ok()?, self.zone.clone());
        let next = self.pattern.find_next_occurrence(&from, false).ok()?;
        // When clocks are set back, the result could be in the past.
        Some(SystemTime::from(next.timestamp())).filter(|next| *next > time)
    }

    /// The id of the job for one time.
    fn id(&self, time: SystemTime) -> String {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("{}@{}", self.name, since.as_secs())
    }

    /// The times after `time`.
    fn after(&self, time: SystemTime) -> impl Iterator<Item = SystemTime> {
        successors(self.next_after(time), |time| self.next_after(*time))
    }

    /// The times after `now` for which a process may have pushed a job: up to the next time by a clock that is [`MAX_CLOCK_SKEW`] ahead.
    fn upcoming(&self, now: SystemTime) -> impl Iterator<Item = SystemTime> {
        let last = self.next_after(now + MAX_CLOCK_SKEW);
        self.after(now).take_while(move |time| last.is_none_or(|last| *time <= last))
    }

    /// The number of times after `from`, up to `until`, and at most [`MAX_COUNTED`].
    fn count(&self, from: SystemTime, until: SystemTime) -> usize {
        self.after(from).take_while(|time| *time <= until).take(MAX_COUNTED).count()
    }
}

fn invalid(error: &dyn Error) -> ConfigError {
    ConfigError::InvalidSchedule { reason: error.to_string() }
}

/// Pushes a job for each time of a [`Schedule`].
///
/// Any number of processes may run it at the same time. The id of a job is the name of the schedule and its time in seconds since 1970,
/// such as `nightly@1767225600`, so that each job is pushed once. There is no leader.
///
/// The job of the next time is pushed as soon as the previous one is due. So a worker runs that job even if no process with a `Recurring`
/// is left at its time. Further times without such a process are not made up for. The clocks of the processes may differ by up to an hour:
/// the store's clock determines when a job is due.
///
/// After you change or drop a schedule, one of its jobs is therefore left, and more if the clock of a pushing process is ahead. These jobs
/// run at their times unless you [`retire`](Self::retire) the schedule.
///
/// To skip one time, [cancel](DelayQueue::cancel) its job: no `Recurring` pushes that time again. To undo that,
/// [release](DelayQueue::release_unique) the unique key, which is the id of the job. The next `Recurring` that starts before that time
/// pushes the job again.
///
/// ```
/// use std::time::Duration;
/// use tollgate::delay_queue::{DelayQueue, Recurring, Schedule};
/// use tollgate::MemoryBackend;
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), tollgate::BoxError> {
/// let queue = DelayQueue::<String>::new(MemoryBackend::new(), "reports");
/// let hourly = Schedule::cron("hourly", "0 * * * *")?;
/// let shutdown = tokio::time::sleep(Duration::from_secs(2 * 3_600));
/// Recurring::new(queue.clone(), hourly, |_| "all of it".to_owned()).run_until(shutdown).await;
/// assert_eq!(queue.counts().await?.waiting, 3); // two are due, and one is due later
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is pushed until it runs"]
pub struct Recurring<T, F, C = Json> {
    queue: DelayQueue<T, C>,
    schedule: Schedule,
    payload: F,
    configure: Box<ConfigurePush>,
    clock: Clock,
}

type ConfigurePush = dyn Fn(Push) -> Push + Send + Sync;

impl<T, F, C> Recurring<T, F, C>
where
    F: FnMut(SystemTime) -> T,
    C: Codec<T>,
{
    /// Pushes to `queue` a job for each time, with the payload that `payload` makes of the time.
    pub fn new(queue: DelayQueue<T, C>, schedule: Schedule, payload: F) -> Self {
        Self { queue, schedule, payload, configure: Box::new(|push| push), clock: Clock::new() }
    }

    /// Sets options of each push: the priority, the attempts, the headers. Defaults to none. The schedule determines the id, the due time and
    /// the unique key, and overrides yours.
    pub fn push_with(mut self, configure: impl Fn(Push) -> Push + Send + Sync + 'static) -> Self {
        self.configure = Box::new(configure);
        self
    }

    /// Removes the waiting jobs of future times, for a schedule that was changed or dropped. Call it when no process pushes for the schedule any
    /// more. Returns whether there was such a job.
    ///
    /// It covers the times of the schedule within the next hour, and the first time after that: the clock of a pushing process may have been
    /// an hour ahead. It calls the store once for each of them, and once more for each removal. A schedule with a time every second has 3,601.
    /// The current time is read from the clock of this process. If a test has paused tokio's clock, the time
    /// advances with that clock from when this value was created.
    ///
    /// If the store's clock is ahead, one of these jobs may be running already: it finishes. A job that starts between the two calls about it
    /// is [told to give up](super::Job::cancellation), and is not tried again.
    ///
    /// The jobs of past times stay. With a `MemoryBackend` these may include a job that is late because the machine was
    /// [suspended](Due::At).
    ///
    /// The time of a removed job gets no other job, even from a `Recurring` that starts later.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]. Some jobs may then be removed.
    pub async fn retire(self) -> Result<bool, QueueError> {
        let mut is_removed = false;
        for time in self.schedule.upcoming(self.clock.now()) {
            let id = JobId::from(self.schedule.id(time));
            // Cancelling a running job would stop it.
            if self.queue.get(id).await?.is_some_and(|job| job.state == State::Waiting) {
                is_removed |= self.queue.cancel(id).await? == Cancelled::Removed;
            }
        }
        Ok(is_removed)
    }

    /// Pushes jobs for as long as the schedule has times, or until the [backend is shut down](crate::backend#shutdown).
    ///
    /// While the store fails or the queue is full, it retries. A job that cannot be pushed for another reason is skipped and logged. If a job
    /// can be pushed only after its time, it is pushed late, and the times that have passed meanwhile are skipped. Their number is logged,
    /// whether or not another process has pushed for them. A time beyond the longest [delay](Due::MAX_DELAY) is pushed when it comes within
    /// that.
    ///
    /// If the clock is set back, the scheduler finds out within a minute, logs it, and continues with the times after the new date. A repeated
    /// time gets no second job if the clock was set back by less than an hour.
    ///
    /// # Cancellation
    ///
    /// You may drop the future at any time. Jobs that were pushed stay.
    pub async fn run(self) {
        self.run_until(pending()).await;
    }

    /// Pushes jobs until `shutdown` completes, or the [backend is shut down](crate::backend#shutdown): see [`run`](Self::run).
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) {
        let guard = self.queue.start_activity();
        tokio::select! {
            // After the shutdown no further job is pushed.
            biased;
            () = guard.activity().closed() => {}
            () = shutdown => {}
            () = self.push_all() => {}
        }
    }

    async fn push_all(&mut self) {
        let mut last = self.clock.now();
        while let Some(time) = self.schedule.next_after(last) {
            let earliest = time.checked_sub(MAX_PUSH_AHEAD).unwrap_or(SystemTime::UNIX_EPOCH);
            let mut is_time = self.sleep_until(earliest, last, time).await;
            if is_time {
                self.push(time).await;
                is_time = self.sleep_until(time, last, time).await;
            }
            if !is_time {
                let name = &self.schedule.name;
                tracing::warn!(queue = %self.queue.name(), schedule = name, "the clock was set back: the schedule continues from the current time");
                last = self.clock.now();
                continue;
            }
            last = time.max(self.clock.now());
            // One late job stands for all skipped times.
            let left_out = self.schedule.count(time, last);
            if left_out > 0 {
                let (name, is_more) = (&self.schedule.name, left_out == MAX_COUNTED);
                tracing::warn!(queue = %self.queue.name(), schedule = name, left_out, is_more, "times of a schedule were missed: they have no jobs unless another process pushed them");
            }
        }
    }

    /// Sleeps until `end`. Returns `false` if the clock was set back to a date before `last`, and the schedule now has a time before `time`.
    async fn sleep_until(&self, end: SystemTime, last: SystemTime, time: SystemTime) -> bool {
        loop {
            let now = self.clock.now();
            let Ok(remaining) = end.duration_since(now) else { return true };
            if now + CLOCK_TOLERANCE < last && self.schedule.next_after(now).is_some_and(|next| next < time) {
                return false;
            }
            // By the system clock, a sleep may end slightly early. The minimum keeps the loop from spinning.
            sleep(remaining.clamp(Duration::from_millis(1), LONGEST_SLEEP)).await;
        }
    }

    async fn push(&mut self, time: SystemTime) {
        let (name, id) = (&self.schedule.name, self.schedule.id(time));
        let payload = (self.payload)(time);
        let (mut pause, mut is_logged) = (FIRST_PAUSE, false);
        loop {
            // The key is held beyond the time of the job, so that a process whose clock is behind finds the key after the job is done and removed.
            let span = time.duration_since(self.clock.now()).unwrap_or_default() + MAX_CLOCK_SKEW;
            let push = (self.configure)(self.queue.push(&payload));
            match push.id(&*id).at(time).unique_for(&*id, UniqueFor::Occurrence(span)).await {
                Ok(_) => return,
                Err(error @ (QueueError::Store(_) | QueueError::Full { .. })) => {
                    if !mem::replace(&mut is_logged, true) {
                        let cause = error.source().map(tracing::field::display);
                        tracing::warn!(queue = %self.queue.name(), schedule = name, %error, cause, "a recurring job could not be pushed yet");
                    }
                }
                Err(error) => {
                    let cause = error.source().map(tracing::field::display);
                    tracing::error!(queue = %self.queue.name(), schedule = name, %error, cause, "a recurring job cannot be pushed");
                    return;
                }
            }
            sleep(pause / 2 + share(pause / 2)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl<T, F, C> fmt::Debug for Recurring<T, F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recurring")
            .field("queue", &self.queue)
            .field("schedule", &self.schedule)
            .finish_non_exhaustive()
    }
}

/// The date. If a test has paused tokio's clock, the date advances with that clock.
struct Clock {
    date: SystemTime,
    std_instant: StdInstant,
    instant: Instant,
    // By how many seconds the date is ahead.
    #[cfg(test)]
    ahead: Arc<AtomicU64>,
}

impl Clock {
    fn new() -> Self {
        Self {
            date: SystemTime::now(),
            // Read before tokio's clock here and after it in `now`: tokio's clock is ahead only if it was paused.
            std_instant: StdInstant::now(),
            instant: Instant::now(),
            #[cfg(test)]
            ahead: Arc::default(),
        }
    }

    fn now(&self) -> SystemTime {
        let elapsed = self.instant.elapsed();
        let now = if elapsed > self.std_instant.elapsed() { self.date + elapsed } else { SystemTime::now() };
        #[cfg(test)]
        let now = now + Duration::from_secs(self.ahead.load(Ordering::Relaxed));
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(schedule: &Schedule, from: &str, count: usize) -> Vec<String> {
        let from = SystemTime::from(from.parse::<Timestamp>().unwrap());
        let times = successors(schedule.next_after(from), |time| schedule.next_after(*time));
        times.take(count).map(|time| Timestamp::try_from(time).unwrap().to_string()).collect()
    }

    #[test]
    fn times_follow_the_time_zone() {
        let schedule = Schedule::cron("a", "0 9 * * MON-FRI").unwrap().time_zone("America/New_York").unwrap();
        let expected = ["2026-07-03T13:00:00Z", "2026-07-06T13:00:00Z"];
        assert_eq!(times(&schedule, "2026-07-02T13:00:00Z", 2), expected);
        assert_eq!(times(&schedule, "2026-01-02T13:59:59Z", 1), ["2026-01-02T14:00:00Z"]);
    }

    #[test]
    fn single_time_comes_once_when_clocks_change() {
        let schedule = Schedule::cron("a", "30 2 * * *").unwrap().time_zone("Europe/Berlin").unwrap();
        // On 25 October clocks are set back from three to two, on 29 March forward from two to three.
        let autumn = times(&schedule, "2026-10-24T12:00:00Z", 2);
        assert!(autumn[0].starts_with("2026-10-25T0") && autumn[1] == "2026-10-26T01:30:00Z", "{autumn:?}");
        let spring = times(&schedule, "2026-03-28T12:00:00Z", 2);
        assert!(spring[0].starts_with("2026-03-29T01:") && spring[1] == "2026-03-30T00:30:00Z", "{spring:?}");
    }

    /// The skipped hour ends on a day that does not match the pattern.
    #[test]
    fn skipped_time_before_midnight_needs_a_matching_next_day() {
        let times_of = |pattern| {
            let schedule = Schedule::cron("a", pattern).unwrap().time_zone("America/Nuuk").unwrap();
            times(&schedule, "2027-03-27T12:00:00Z", 2)
        };
        assert_eq!(times_of("30 23 * * SAT"), ["2027-04-04T00:30:00Z", "2027-04-11T00:30:00Z"]);
        assert_eq!(times_of("30 23 * * SAT,SUN"), ["2027-03-28T01:00:00Z", "2027-03-29T00:30:00Z"]);
    }

    #[test]
    fn list_of_times_follows_the_clock_when_it_changes() {
        let schedule = Schedule::cron("a", "0,30 2 * * *").unwrap().time_zone("Europe/Berlin").unwrap();
        let autumn = ["2026-10-25T00:00:00Z", "2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z"];
        assert_eq!(times(&schedule, "2026-10-24T12:00:00Z", 4), autumn);
        assert_eq!(times(&schedule, "2026-10-25T01:30:00Z", 1), ["2026-10-26T01:00:00Z"]);
        assert_eq!(times(&schedule, "2026-03-28T12:00:00Z", 1), ["2026-03-30T00:00:00Z"]);
    }

    #[test]
    fn skipped_times_are_counted_up_to_the_limit() {
        let schedule = Schedule::cron("a", "*/10 * * * * *").unwrap();
        let from = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let count = |secs| schedule.count(from, from + Duration::from_secs(secs));
        assert_eq!((count(0), count(9), count(10), count(65)), (0, 0, 1, 6));
        assert_eq!(count(365 * 86_400), MAX_COUNTED);
    }

    #[test]
    fn date_follows_the_machine_if_it_was_wrong_at_first() {
        let mut clock = Clock::new();
        clock.date += 24 * MAX_CLOCK_SKEW;
        assert!(clock.now() < SystemTime::now() + MAX_CLOCK_SKEW);
    }

    #[cfg(feature = "json")]
    #[tokio::test(start_paused = true)]
    async fn scheduler_goes_back_after_its_clock_was_ahead() {
        let queue = DelayQueue::<()>::new(crate::MemoryBackend::new(), "test");
        let schedule = Schedule::cron("a", "* * * * *").unwrap();
        let recurring = Recurring::new(queue.clone(), schedule.clone(), |_| ());
        let (start, ahead) = (recurring.clock.now(), Arc::clone(&recurring.clock.ahead));
        let secs = Duration::from_secs;
        let steps = async {
            sleep(secs(30)).await;
            ahead.store(86_400, Ordering::Relaxed);
            sleep(secs(120)).await;
            ahead.store(0, Ordering::Relaxed);
            sleep(secs(240)).await;
        };
        recurring.run_until(steps).await;
        let is_there = async |time| queue.get(schedule.id(time)).await.unwrap().is_some();
        assert!(is_there(schedule.next_after(start + secs(86_400 + 90)).unwrap()).await, "the clock was ahead");
        // The scheduler checks once a minute.
        let times: Vec<_> =
            schedule.after(start + secs(150 + 62)).take_while(|time| *time < start + secs(380)).collect();
        assert!(times.len() >= 2, "{times:?}");
        for time in times {
            assert!(is_there(time).await, "{time:?}");
        }
    }

    #[test]
    fn invalid_schedules_are_rejected() {
        assert!(matches!(Schedule::cron("a", "61 * * * *"), Err(ConfigError::InvalidSchedule { .. })));
        assert!(matches!(Schedule::cron("a", ""), Err(ConfigError::InvalidSchedule { .. })));
        let error = Schedule::cron("a", "* * * * *").unwrap().time_zone("Europe/Atlantis").unwrap_err();
        assert!(error.to_string().contains("Atlantis"), "{error}");
        // 30 February does not exist.
        assert_eq!(Schedule::cron("a", "0 0 30 2 *").unwrap().next_after(SystemTime::now()), None);
    }
}

use std::error::Error;
use std::fmt;
use std::future::{Future, pending};
use std::iter::successors;
use std::mem;
use std::pin::pin;
use std::str::FromStr;
#[cfg(test)]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::{Duration, Instant as SystemInstant, SystemTime};

use croner::Cron;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use tokio::time::{Instant, sleep};

use super::backoff::share;
use super::codec::{Codec, Json};
use super::error::QueueError;
use super::id::JobId;
use super::push::Push;
use super::queue::DelayQueue;
use super::record::{Due, UniqueFor};
use super::store::{Cancelled, State};
use crate::error::ConfigError;

/// How far behind the clock of a scheduler may be without a job being pushed a second time, or ahead of the one that retires a schedule.
const APART: Duration = Duration::from_secs(3_600);
/// How long before its time a job is pushed at the most: within the longest delay, as is for how long its key is held.
const AHEAD: Duration = Due::MAX_DELAY.saturating_sub(Duration::from_secs(2 * 3_600));
/// The pause after a push that failed, doubled with each further one up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long the scheduler sleeps at the most, so that a machine that was asleep catches up, and one whose clock was ahead goes back.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// A clock that is set back by no more was set right, and what was pushed is not pushed again.
const CORRECTION: Duration = Duration::from_secs(1);
/// How many times that were left out are counted.
const MOST_COUNTED: usize = 1_000;

/// When something is to happen again and again: a cron pattern in a time zone.
///
/// A pattern with one second, one minute and one hour comes once on a day when clocks are changed: at the first of two such times, or at the
/// end of the hour that there is not; where that ends at midnight, only if the day that begins then is one of the pattern's, too. Any other one, of a list or a step such as `0,30 2 * * *`, follows the clock: its times come twice
/// or not at all on such a day. Two schedules with one time each come once.
///
/// ```
/// use tollgate::delay_queue::Schedule;
///
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// // At half past two at night, which is twice or never when clocks are changed: once all the same, as it is one time of the day.
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
    /// The times of `pattern`: minute, hour, day of the month, month and day of the week, with seconds before them if there are six fields.
    /// In UTC unless told [otherwise](Self::time_zone). `name` tells the schedule from others of its queue.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSchedule`].
    pub fn cron(name: impl Into<String>, pattern: &str) -> Result<Self, ConfigError> {
        let pattern = Cron::from_str(pattern).map_err(|error| invalid(&error))?;
        Ok(Self { name: name.into(), pattern, zone: TimeZone::UTC })
    }

    /// The zone of its times, by its name in the [IANA database](https://www.iana.org/time-zones). Defaults to UTC.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSchedule`] if there is no such zone.
    pub fn time_zone(self, name: &str) -> Result<Self, ConfigError> {
        let zone = TimeZone::get(name).map_err(|error| invalid(&error))?;
        Ok(Self { zone, ..self })
    }

    /// The first of its times that is later than `instant`; `None` if there is none.
    #[must_use]
    pub fn next_after(&self, instant: SystemTime) -> Option<SystemTime> {
        let from = Zoned::new(Timestamp::try_from(instant).ok()?, self.zone.clone());
        let next = self.pattern.find_next_occurrence(&from, false).ok()?;
        // Where clocks are set back a time could be found that has been.
        Some(SystemTime::from(next.timestamp())).filter(|next| *next > instant)
    }

    /// What the job of one of its times is called.
    fn id(&self, time: SystemTime) -> String {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("{}@{}", self.name, since.as_secs())
    }

    /// Its times that are later than `instant`.
    fn after(&self, instant: SystemTime) -> impl Iterator<Item = SystemTime> {
        successors(self.next_after(instant), |time| self.next_after(*time))
    }

    /// All times for which there may be a job already, by a clock that says `now`: up to the next one by a clock that is ahead.
    fn ahead(&self, now: SystemTime) -> impl Iterator<Item = SystemTime> {
        let last = self.next_after(now + APART);
        self.after(now).take_while(move |time| last.is_none_or(|last| *time <= last))
    }

    /// How many of its times are later than `from`, up to `until`. Counts no further than to [`MOST_COUNTED`].
    fn count(&self, from: SystemTime, until: SystemTime) -> usize {
        self.after(from).take_while(|time| *time <= until).take(MOST_COUNTED).count()
    }
}

fn invalid(error: &dyn Error) -> ConfigError {
    ConfigError::InvalidSchedule { reason: error.to_string() }
}

/// Pushes a job for each time of a [`Schedule`].
///
/// Any number of processes may do so at the same time: the id of a job is the name of the schedule and its time, so that it is there once:
/// `nightly@1767225600`, in seconds since 1970. There is no leader. The job of the next time is pushed as soon as the one before is due, so that it comes although all who push are
/// gone by then; times at which nobody was there before either are not made up for. The clocks of those who push may be up to an
/// hour apart: when a job is due is told by the store's.
///
/// So a schedule that is changed or not used any more has a job left, and those of the times in between as well where the clock of one who pushed is
/// ahead. They come at their times in any case: [`retire`](Self::retire) removes them.
///
/// To leave out one time, [cancel](DelayQueue::cancel) its job: no `Recurring` pushes that time again. If the job is to come after all,
/// [release](DelayQueue::release_unique) the unique key, which is the id of the job, before the next `Recurring` starts.
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
/// assert_eq!(queue.counts().await?.waiting, 3); // two are due, and one is still to come
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is pushed until it runs"]
pub struct Recurring<T, F, C = Json> {
    queue: DelayQueue<T, C>,
    schedule: Schedule,
    payload: F,
    terms: Box<Terms>,
    clock: Clock,
}

type Terms = dyn Fn(Push) -> Push + Send + Sync;

impl<T, F, C> Recurring<T, F, C>
where
    F: FnMut(SystemTime) -> T,
    C: Codec<T>,
{
    /// Pushes to `queue` what `payload` makes of each of the times.
    pub fn new(queue: DelayQueue<T, C>, schedule: Schedule, payload: F) -> Self {
        Self { queue, schedule, payload, terms: Box::new(|push| push), clock: Clock::new() }
    }

    /// What else is said of each job: its priority, its attempts, its headers. Defaults to nothing. The id, the time and the unique key
    /// are those of the schedule, whatever is said.
    pub fn push_with(mut self, terms: impl Fn(Push) -> Push + Send + Sync + 'static) -> Self {
        self.terms = Box::new(terms);
        self
    }

    /// Removes the jobs of the times to come, if they wait: for a schedule as it was before it was changed, or that is not used any more. To be called
    /// when nobody pushes for it any more. Answers whether there was one.
    ///
    /// Those are the times of the hour to come, by which the clock of one who pushed may have been ahead, and the one after it. Each is a call of
    /// the store, up to 3,601 for a schedule that comes every second, and so is each removal. What time it is the clock of this process says; where a
    /// test has paused that of tokio, it goes on with it from when this value was made.
    ///
    /// A job that runs already, by a clock of the store that is ahead, comes to its end. Only one that begins just between the two calls about it is
    /// [told to give up](super::Job::cancellation), and not tried again.
    ///
    /// The job of a time that is over stays. In memory that may be one to come: it is late if the machine was [suspended](Due::At) while it waited.
    ///
    /// The time of a job that was removed is not given to another one: it is left out also by who pushes for the schedule again.
    ///
    /// # Errors
    ///
    /// [`QueueError::Store`]; some are removed then.
    pub async fn retire(self) -> Result<bool, QueueError> {
        let mut is_removed = false;
        for time in self.schedule.ahead(self.clock.now()) {
            let id = JobId::from(self.schedule.id(time));
            // One that runs would be told to give up.
            if self.queue.get(id).await?.is_some_and(|job| job.state == State::Waiting) {
                is_removed |= self.queue.cancel(id).await? == Cancelled::Removed;
            }
        }
        Ok(is_removed)
    }

    /// Pushes for as long as the schedule has times. While the store fails or the queue is full it is asked again; what cannot be pushed for
    /// another reason is left out, and logged. A job that could be pushed only after its time is there once, late, and the times that have
    /// passed meanwhile are left out: how many those are is logged, too, whether another process has pushed for them or not. A time that is further away than the longest
    /// [delay](Due::MAX_DELAY) is pushed when it is not any more.
    ///
    /// Where the clock is set back, those who push go back to its times within a minute, which is logged. A time that comes once more has no second
    /// job if the clock was set back by less than an hour.
    ///
    /// # Cancellation
    ///
    /// May be dropped at any time. What was pushed stays.
    pub async fn run(self) {
        self.run_until(pending()).await;
    }

    /// The same until `shutdown` is ready.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = pin!(shutdown);
        tokio::select! {
            () = &mut shutdown => {}
            () = self.push_all() => {}
        }
    }

    async fn push_all(&mut self) {
        let mut last = self.clock.now();
        while let Some(time) = self.schedule.next_after(last) {
            let earliest = time.checked_sub(AHEAD).unwrap_or(SystemTime::UNIX_EPOCH);
            let mut has_come = self.sleep_until(earliest, last, time).await;
            if has_come {
                self.push(time).await;
                has_come = self.sleep_until(time, last, time).await;
            }
            if !has_come {
                let name = &self.schedule.name;
                tracing::warn!(queue = %self.queue.name(), schedule = name, "the clock was set back: what is pushed next is the next time of a schedule by what it says now");
                last = self.clock.now();
                continue;
            }
            last = time.max(self.clock.now());
            // One job for all of them: many at once, and late, would do nobody good.
            let left_out = self.schedule.count(time, last);
            if left_out > 0 {
                let (name, is_more) = (&self.schedule.name, left_out == MOST_COUNTED);
                tracing::warn!(queue = %self.queue.name(), schedule = name, left_out, is_more, "this process was too late for times of a schedule: they have no job unless another process has pushed it");
            }
        }
    }

    /// Sleeps until it is `instant`. Answers whether it is: not if the clock is set back before `last`, so that something else than `time` comes
    /// next.
    async fn sleep_until(&self, instant: SystemTime, last: SystemTime, time: SystemTime) -> bool {
        loop {
            let now = self.clock.now();
            let Ok(rest) = instant.duration_since(now) else { return true };
            if now + CORRECTION < last && self.schedule.next_after(now).is_some_and(|next| next < time) {
                return false;
            }
            // The end of a sleep may be a moment too early for a clock that counts more finely.
            sleep(rest.clamp(Duration::from_millis(1), LONGEST_SLEEP)).await;
        }
    }

    async fn push(&mut self, time: SystemTime) {
        let (name, id) = (&self.schedule.name, self.schedule.id(time));
        let payload = (self.payload)(time);
        let (mut pause, mut is_told) = (FIRST_PAUSE, false);
        loop {
            // Whoever has the time behind us finds the key when the job is done and forgotten.
            let span = time.duration_since(self.clock.now()).unwrap_or_default() + APART;
            let push = (self.terms)(self.queue.push(&payload));
            match push.id(&*id).at(time).unique_for(&*id, UniqueFor::Occurrence(span)).await {
                Ok(_) => return,
                Err(error @ (QueueError::Store(_) | QueueError::Full { .. })) => {
                    if !mem::replace(&mut is_told, true) {
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

/// The date; where a test has paused tokio's clock it goes on by that.
struct Clock {
    date: SystemTime,
    system: SystemInstant,
    instant: Instant,
    // By how many seconds the date is wrong.
    #[cfg(test)]
    ahead: Arc<AtomicU64>,
}

impl Clock {
    fn new() -> Self {
        Self {
            date: SystemTime::now(),
            // Before tokio's, and read after it: that is ahead where it was paused, and nowhere else.
            system: SystemInstant::now(),
            instant: Instant::now(),
            #[cfg(test)]
            ahead: Arc::default(),
        }
    }

    fn now(&self) -> SystemTime {
        let elapsed = self.instant.elapsed();
        let now = if elapsed > self.system.elapsed() { self.date + elapsed } else { SystemTime::now() };
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
    fn times_are_those_of_the_zone() {
        let schedule = Schedule::cron("a", "0 9 * * MON-FRI").unwrap().time_zone("America/New_York").unwrap();
        let expected = ["2026-07-03T13:00:00Z", "2026-07-06T13:00:00Z"];
        assert_eq!(times(&schedule, "2026-07-02T13:00:00Z", 2), expected);
        assert_eq!(times(&schedule, "2026-01-02T13:59:59Z", 1), ["2026-01-02T14:00:00Z"]);
    }

    #[test]
    fn a_time_that_is_twice_or_never_comes_once() {
        let schedule = Schedule::cron("a", "30 2 * * *").unwrap().time_zone("Europe/Berlin").unwrap();
        // On 25 October clocks are set back from three to two, on 29 March forward from two to three.
        let autumn = times(&schedule, "2026-10-24T12:00:00Z", 2);
        assert!(autumn[0].starts_with("2026-10-25T0") && autumn[1] == "2026-10-26T01:30:00Z", "{autumn:?}");
        let spring = times(&schedule, "2026-03-28T12:00:00Z", 2);
        assert!(spring[0].starts_with("2026-03-29T01:") && spring[1] == "2026-03-30T00:30:00Z", "{spring:?}");
    }

    /// The hour ends on a day that the pattern does not have.
    #[test]
    fn a_time_that_there_is_not_before_midnight_is_left_out_where_the_next_day_is_none_of_the_pattern() {
        let times_of = |pattern| {
            let schedule = Schedule::cron("a", pattern).unwrap().time_zone("America/Nuuk").unwrap();
            times(&schedule, "2027-03-27T12:00:00Z", 2)
        };
        assert_eq!(times_of("30 23 * * SAT"), ["2027-04-04T00:30:00Z", "2027-04-11T00:30:00Z"]);
        assert_eq!(times_of("30 23 * * SAT,SUN"), ["2027-03-28T01:00:00Z", "2027-03-29T00:30:00Z"]);
    }

    #[test]
    fn a_list_of_times_follows_the_clock_when_it_is_changed() {
        let schedule = Schedule::cron("a", "0,30 2 * * *").unwrap().time_zone("Europe/Berlin").unwrap();
        let autumn = ["2026-10-25T00:00:00Z", "2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T01:30:00Z"];
        assert_eq!(times(&schedule, "2026-10-24T12:00:00Z", 4), autumn);
        assert_eq!(times(&schedule, "2026-10-25T01:30:00Z", 1), ["2026-10-26T01:00:00Z"]);
        assert_eq!(times(&schedule, "2026-03-28T12:00:00Z", 1), ["2026-03-30T00:00:00Z"]);
    }

    #[test]
    fn times_that_have_passed_are_counted_so_far() {
        let schedule = Schedule::cron("a", "*/10 * * * * *").unwrap();
        let from = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let count = |secs| schedule.count(from, from + Duration::from_secs(secs));
        assert_eq!((count(0), count(9), count(10), count(65)), (0, 0, 1, 6));
        assert_eq!(count(365 * 86_400), MOST_COUNTED);
    }

    #[test]
    fn the_date_is_that_of_the_machine_also_where_it_was_wrong_at_first() {
        let mut clock = Clock::new();
        clock.date += 24 * APART;
        assert!(clock.now() < SystemTime::now() + APART);
    }

    #[cfg(feature = "json")]
    #[tokio::test(start_paused = true)]
    async fn who_pushed_by_a_clock_that_was_ahead_goes_back() {
        let queue = DelayQueue::<()>::new(crate::MemoryBackend::new(), "test");
        let schedule = Schedule::cron("a", "* * * * *").unwrap();
        let recurring = Recurring::new(queue.clone(), schedule.clone(), |_| ());
        let (begun, ahead) = (recurring.clock.now(), Arc::clone(&recurring.clock.ahead));
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
        assert!(is_there(schedule.next_after(begun + secs(86_400 + 90)).unwrap()).await, "the clock was ahead");
        // It looks once in a minute.
        let times: Vec<_> =
            schedule.after(begun + secs(150 + 62)).take_while(|time| *time < begun + secs(380)).collect();
        assert!(times.len() >= 2, "{times:?}");
        for time in times {
            assert!(is_there(time).await, "{time:?}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        assert!(matches!(Schedule::cron("a", "61 * * * *"), Err(ConfigError::InvalidSchedule { .. })));
        assert!(matches!(Schedule::cron("a", ""), Err(ConfigError::InvalidSchedule { .. })));
        let error = Schedule::cron("a", "* * * * *").unwrap().time_zone("Europe/Atlantis").unwrap_err();
        assert!(error.to_string().contains("Atlantis"), "{error}");
        // There is no such day.
        assert_eq!(Schedule::cron("a", "0 0 30 2 *").unwrap().next_after(SystemTime::now()), None);
    }
}

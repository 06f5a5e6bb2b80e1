use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::store::MAX_BATCH;
use crate::error::StoreError;
use crate::key::{Key, ParseKeyError};

/// What a job is called: a name of the caller's choice, or a [ULID](https://github.com/ulid/spec), which says when it was made.
///
/// A name is escaped and bounded as every [`Key`] is. Jobs that are due in the same millisecond are taken in the order of their
/// ids, so those that one process pushes one after the other without a name come in that order.
///
/// What it is shown as, in a log or a table of one's own, is made an id again by `parse`. A name is not: [`new`](Self::new) is for these, and
/// would escape once more what was escaped.
///
/// ```
/// use tollgate::JobId;
///
/// let id = JobId::new(("welcome", 42));
/// assert_eq!(id.to_string(), "welcome,42");
/// assert_eq!("welcome,42".parse(), Ok(id));
/// assert_ne!(JobId::new("welcome,42"), id);
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JobId(Key);

impl JobId {
    /// The job that the caller calls `name`.
    pub fn new(name: impl Into<Key>) -> Self {
        Self(name.into())
    }

    /// An id that nobody else has, larger than all that this process has made before.
    ///
    /// # Errors
    ///
    /// If the system has no random numbers to give.
    pub fn unique() -> Result<Self, StoreError> {
        Ok(Self(Ulid::reserve(1)?.to_key()))
    }

    /// No id is less.
    pub(crate) const LEAST: Self = Self(Key::EMPTY);

    /// The id as it appears in a store, and as it is shown. `parse` makes the same id of it again.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// The id as a key.
    #[must_use]
    pub const fn as_key(&self) -> &Key {
        &self.0
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// What a ULID has before its last digit, and that one; `None` for what cannot be a ULID.
    #[cfg(feature = "redis")]
    pub(crate) fn digit(&self) -> Option<(&[u8], usize)> {
        let (last, stem) = self.as_bytes().split_last()?;
        let digit = Ulid::DIGITS.iter().position(|digit| digit == last)?;
        (stem.len() == Ulid::LEN - 1).then_some((stem, digit))
    }

    /// What [`as_bytes`](Self::as_bytes) has given, from a store; `None` if that cannot be an id.
    #[cfg(feature = "redis")]
    pub(crate) fn from_store(bytes: &[u8]) -> Option<Self> {
        Key::stored(str::from_utf8(bytes).ok()?).map(Self)
    }
}

/// Ids as [`JobId::unique`] makes them, so many of which follow each other: a store may keep these with less.
#[derive(Default)]
pub(crate) struct UniqueIds {
    next: Ulid,
    left: usize,
}

impl UniqueIds {
    /// # Errors
    ///
    /// If the system has no random numbers to give.
    pub(crate) fn next(&mut self) -> Result<JobId, StoreError> {
        if self.left == 0 {
            (self.next, self.left) = (Ulid::reserve(MAX_BATCH)?, MAX_BATCH);
        }
        let id = JobId(self.next.to_key());
        (self.next, self.left) = (self.next.next(), self.left - 1);
        Ok(id)
    }
}

/// 48 bits of time and 80 random bits. Within one millisecond the next is the last one and 1 more.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Ulid(u128);

const RANDOM_BITS: u32 = 80;

impl Ulid {
    /// Crockford's base 32.
    const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    /// How many digits it has.
    const LEN: usize = 26;

    /// The first of so many that follow each other. Where those are several, the last digit of the first is 0.
    fn reserve(count: usize) -> Result<Self, StoreError> {
        static LAST: Mutex<Ulid> = Mutex::new(Ulid(0));
        let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let mut first = last.after(now_ms)?;
        if count > 1 {
            first = Self(first.0.wrapping_add(31) & !31);
        }
        *last = Self(first.0.wrapping_add(count as u128 - 1));
        Ok(first)
    }

    const fn next(self) -> Self {
        // A carry into the time is a millisecond that has not begun yet, which does no harm.
        Self(self.0.wrapping_add(1))
    }

    fn after(self, now_ms: u64) -> Result<Self, StoreError> {
        let last_ms = (self.0 >> RANDOM_BITS) as u64;
        if now_ms <= last_ms {
            return Ok(self.next());
        }
        let mut random = [0; 16];
        getrandom::fill(&mut random[..10]).map_err(StoreError::other)?;
        // The highest bit stays free, so that there is room to count.
        let random = u128::from_le_bytes(random) >> 1;
        Ok(Self(u128::from(now_ms) << RANDOM_BITS | random))
    }

    /// Digits that sort as the numbers do.
    fn to_key(self) -> Key {
        let mut text = [0; Self::LEN];
        for (i, digit) in text.iter_mut().rev().enumerate() {
            *digit = Self::DIGITS[(self.0 >> (5 * i)) as usize & 31];
        }
        Key::new(text)
    }
}

impl Ord for JobId {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for JobId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

// By hand: a key is an array of its longest length, and most are short.
impl Hash for JobId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl<K: Into<Key>> From<K> for JobId {
    fn from(name: K) -> Self {
        Self::new(name)
    }
}

impl From<&JobId> for JobId {
    fn from(id: &JobId) -> Self {
        *id
    }
}

/// The id that [`JobId::as_str`] answers this for.
///
/// # Errors
///
/// If it does so for none.
impl FromStr for JobId {
    type Err = ParseKeyError;

    fn from_str(text: &str) -> Result<Self, ParseKeyError> {
        Key::parse(text).map(Self)
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({self})")
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_ulids_that_rise() {
        let ids: Vec<_> = (0..10_000).map(|_| JobId::unique().unwrap()).collect();
        assert!(ids.is_sorted());
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(ids.iter().all(|id| id.as_str().len() == 26));
    }

    #[test]
    fn ids_for_several_jobs_follow_each_other() {
        let before = JobId::unique().unwrap();
        let mut ids = UniqueIds::default();
        let several: Vec<_> = (0..2 * MAX_BATCH).map(|_| ids.next().unwrap()).collect();
        assert!(before < several[0] && several.is_sorted() && several[several.len() - 1] < JobId::unique().unwrap());
        for ids in several.chunks(Ulid::DIGITS.len()) {
            let stem = &ids[0].as_str()[..Ulid::LEN - 1];
            let digits: String = ids.iter().map(|id| id.as_str().strip_prefix(stem).unwrap()).collect();
            assert_eq!(digits.as_bytes(), Ulid::DIGITS);
        }
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_repeat_ids() {
        let late = Ulid(0).after(2_000).unwrap();
        let early = late.after(1_000).unwrap();
        assert!(early > late && early.to_key().as_str() > late.to_key().as_str());
        assert_eq!(Ulid(1 << RANDOM_BITS).to_key().as_str(), "00000000010000000000000000");
    }

    #[test]
    fn an_id_is_made_again_of_what_it_is_shown_as() {
        for id in [JobId::unique().unwrap(), "a b".into(), "x".repeat(100).into(), ("welcome", 42).into()] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert!("a b".parse::<JobId>().is_err());
    }

    #[test]
    fn any_name_is_an_id() {
        assert_eq!(JobId::from("welcome:42").as_str(), "welcome:42");
        assert!(JobId::from("}{".repeat(1_000)).as_str().len() <= Key::MAX_LEN);
        assert_ne!(JobId::from("{a}"), JobId::from("a"));
    }
}

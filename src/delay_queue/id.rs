use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::limits::MAX_BATCH;
use crate::error::StoreError;
use crate::key::{Key, ParseKeyError};

/// The id of a job: a name of your choice, or a generated [ULID](https://github.com/ulid/spec), which contains its time of creation.
///
/// A name is escaped and bounded like every [`Key`]. Jobs that are due in the same millisecond are claimed in the order of their ids, so
/// generated ids of one process keep the order of its pushes.
///
/// `parse` turns the displayed form, for example from a log or your own table, into the same id. Use [`new`](Self::new) only for names: it
/// would escape the displayed form again.
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
    /// The id with this name.
    pub fn new(name: impl Into<Key>) -> Self {
        Self(name.into())
    }

    /// Generates a unique id, larger than all earlier ones of this process.
    ///
    /// # Errors
    ///
    /// If the system provides no random numbers.
    pub fn unique() -> Result<Self, StoreError> {
        Ok(Self(Ulid::reserve(1)?.to_key()))
    }

    /// The smallest id.
    pub(crate) const LEAST: Self = Self(Key::EMPTY);

    /// The id as a store keeps it and as it is displayed. `parse` turns it into the same id.
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

    /// The id without its last digit, and the value of that digit. `None` if the length or the last character is not that of a ULID.
    #[cfg(feature = "redis")]
    pub(crate) fn digit(&self) -> Option<(&[u8], usize)> {
        let (last, stem) = self.as_bytes().split_last()?;
        let digit = Ulid::DIGITS.iter().position(|digit| digit == last)?;
        (stem.len() == Ulid::LEN - 1).then_some((stem, digit))
    }

    /// The id with these [bytes](Self::as_bytes) from a store; `None` if they are no valid id.
    #[cfg(feature = "redis")]
    pub(crate) fn from_store(bytes: &[u8]) -> Option<Self> {
        Key::stored(str::from_utf8(bytes).ok()?).map(Self)
    }
}

/// Generates consecutive ids, like those of [`JobId::unique`]. A store can keep runs of consecutive ids in less memory.
#[derive(Default)]
pub(crate) struct UniqueIds {
    next: Ulid,
    left: usize,
}

impl UniqueIds {
    /// # Errors
    ///
    /// If the system provides no random numbers.
    pub(crate) fn next(&mut self) -> Result<JobId, StoreError> {
        if self.left == 0 {
            (self.next, self.left) = (Ulid::reserve(MAX_BATCH)?, MAX_BATCH);
        }
        let id = JobId(self.next.to_key());
        (self.next, self.left) = (self.next.next(), self.left - 1);
        Ok(id)
    }
}

/// 48 bits of time and 80 random bits. Within one millisecond, each later ULID is an increment of the first one.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Ulid(u128);

const RANDOM_BITS: u32 = 80;

impl Ulid {
    /// Crockford's base 32.
    const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    /// The number of digits.
    const LEN: usize = 26;

    /// The first of `count` consecutive ULIDs. If `count` is larger than 1, the last digit of the first ULID is 0.
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
        // A carry into the time bits makes the time of the ULID one millisecond too late, which does no harm.
        Self(self.0.wrapping_add(1))
    }

    fn after(self, now_ms: u64) -> Result<Self, StoreError> {
        let last_ms = (self.0 >> RANDOM_BITS) as u64;
        if now_ms <= last_ms {
            return Ok(self.next());
        }
        let mut random = [0; 16];
        getrandom::fill(&mut random[..10]).map_err(StoreError::other)?;
        // The highest random bit is 0, which leaves room for increments.
        let random = u128::from_le_bytes(random) >> 1;
        Ok(Self(u128::from(now_ms) << RANDOM_BITS | random))
    }

    /// The base-32 digits. As text, they sort like the numbers.
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

// By hand: hashes only the used bytes of a key, which is an array of the maximum length.
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

/// Parses the form that [`JobId::as_str`] returns.
///
/// # Errors
///
/// If no id has this form.
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
    fn unique_ids_are_increasing_ulids() {
        let ids: Vec<_> = (0..10_000).map(|_| JobId::unique().unwrap()).collect();
        assert!(ids.is_sorted());
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(ids.iter().all(|id| id.as_str().len() == 26));
    }

    #[test]
    fn batch_ids_are_consecutive() {
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
    fn clock_set_back_repeats_no_id() {
        let late = Ulid(0).after(2_000).unwrap();
        let early = late.after(1_000).unwrap();
        assert!(early > late && early.to_key().as_str() > late.to_key().as_str());
        assert_eq!(Ulid(1 << RANDOM_BITS).to_key().as_str(), "00000000010000000000000000");
    }

    #[test]
    fn id_round_trips_through_display() {
        for id in [JobId::unique().unwrap(), "a b".into(), "x".repeat(100).into(), ("welcome", 42).into()] {
            assert_eq!(id.to_string().parse(), Ok(id));
        }
        assert!("a b".parse::<JobId>().is_err());
    }

    #[test]
    fn any_name_is_a_valid_id() {
        assert_eq!(JobId::from("welcome:42").as_str(), "welcome:42");
        assert!(JobId::from("}{".repeat(1_000)).as_str().len() <= Key::MAX_LEN);
        assert_ne!(JobId::from("{a}"), JobId::from("a"));
    }
}

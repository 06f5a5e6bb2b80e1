//! Tokens of holders.

use std::cell::RefCell;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::error::StoreError;

/// Identifies the holder of a lease: 16 random bytes, new for each acquisition.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Token([u8; 16]);

impl Token {
    /// A unique token.
    ///
    /// # Errors
    ///
    /// If the system has no random numbers.
    pub fn random() -> Result<Self, StoreError> {
        POOL.with_borrow_mut(Pool::take)
    }

    /// The token from a store. `None` unless it has 16 bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().map(Self).ok()
    }

    /// The bytes of the token for a store.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

thread_local! {
    static POOL: RefCell<Pool> = const { RefCell::new(Pool { tokens: [[0; 16]; Pool::SIZE], left: 0 }) };
}

/// Random numbers for several tokens, to save system calls.
struct Pool {
    tokens: [[u8; 16]; Pool::SIZE],
    left: usize,
}

impl Pool {
    const SIZE: usize = 32;

    fn take(&mut self) -> Result<Token, StoreError> {
        if self.left == 0 {
            getrandom::fill(self.tokens.as_flattened_mut()).map_err(StoreError::other)?;
            self.left = Self::SIZE;
        }
        self.left -= 1;
        // From now on only the caller has it.
        Ok(Token(std::mem::take(&mut self.tokens[self.left])))
    }
}

impl Hash for Token {
    // It is random already.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [first, _] = self.0.as_chunks().0 else { return };
        state.write_u64(u64::from_le_bytes(*first));
    }
}

impl fmt::Debug for Token {
    // A client with the token can release the lease, so logs show only a part of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "Token({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}

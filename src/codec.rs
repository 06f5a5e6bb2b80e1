//! How values become bytes in a store.

use crate::error::BoxError;

/// Encodes and decodes payloads of jobs and values of a cache.
///
/// ```
/// use tollgate::{BoxError, Codec};
///
/// #[derive(Clone, Copy, Debug)]
/// struct Plain;
///
/// impl Codec<String> for Plain {
///     fn encode(&self, payload: &String) -> Result<Vec<u8>, BoxError> {
///         Ok(payload.clone().into_bytes())
///     }
///
///     fn decode(&self, bytes: &[u8]) -> Result<String, BoxError> {
///         Ok(str::from_utf8(bytes)?.to_owned())
///     }
/// }
/// ```
pub trait Codec<T> {
    /// Encodes a payload into the bytes to store.
    ///
    /// # Errors
    ///
    /// If the payload cannot be encoded. A job is then not pushed, and a value is not cached.
    fn encode(&self, payload: &T) -> Result<Vec<u8>, BoxError>;

    /// Decodes the bytes from [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// If the bytes are no valid payload. A job is then dead, and its bytes are kept. A cached value counts as missing, and is loaded
    /// again.
    fn decode(&self, bytes: &[u8]) -> Result<T, BoxError>;
}

/// Encodes as JSON with serde. A [`Codec`] with the feature `json`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Json;

#[cfg(feature = "json")]
impl<T: serde::Serialize + serde::de::DeserializeOwned> Codec<T> for Json {
    fn encode(&self, payload: &T) -> Result<Vec<u8>, BoxError> {
        Ok(serde_json::to_vec(payload)?)
    }

    fn decode(&self, bytes: &[u8]) -> Result<T, BoxError> {
        Ok(serde_json::from_slice(bytes)?)
    }
}

use crate::error::BoxError;

/// Encodes and decodes payloads.
///
/// ```
/// use tollgate::BoxError;
/// use tollgate::delay_queue::Codec;
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
    /// If the payload cannot be encoded; the job is then not pushed.
    fn encode(&self, payload: &T) -> Result<Vec<u8>, BoxError>;

    /// Decodes the bytes from [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// If the bytes are no valid payload; the job is then dead, with its bytes kept.
    fn decode(&self, bytes: &[u8]) -> Result<T, BoxError>;
}

/// Encodes payloads as JSON with serde. A [`Codec`] with the feature `json`.
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

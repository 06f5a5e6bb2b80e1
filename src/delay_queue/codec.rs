use crate::error::BoxError;

/// How payloads become bytes and come back.
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
    /// The bytes that are kept.
    ///
    /// # Errors
    ///
    /// If there are none for this payload; it is not pushed then.
    fn encode(&self, payload: &T) -> Result<Vec<u8>, BoxError>;

    /// What [`encode`](Self::encode) was given.
    ///
    /// # Errors
    ///
    /// If the bytes are not those of a payload; the job is dead then, with the bytes kept.
    fn decode(&self, bytes: &[u8]) -> Result<T, BoxError>;
}

/// Payloads as JSON, by serde. A [`Codec`] with the feature `json`.
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

//! Checks the user's certificates and keys before the first connection.

use std::fmt;
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error as TlsError, RootCertStore};

use crate::error::ConfigError;

/// The client library takes a text without certificates for an empty list of CAs, and fails only when it connects.
pub(crate) fn check_authority(pem: &[u8]) -> Result<(), ConfigError> {
    let mut authorities = RootCertStore::empty();
    for certificate in certificates(pem, "the authority's")? {
        authorities.add(certificate).map_err(|error| invalid(format!("the authority's certificate: {error}")))?;
    }
    Ok(())
}

/// The client library checks these only when it connects, and then reports the server as unreachable.
pub(crate) fn check_client(certificate: &[u8], key: &[u8]) -> Result<(), ConfigError> {
    let chain = certificates(certificate, "the client's")?;
    let key = private_key(key)?;
    match CertifiedKey::from_der(chain, key, &provide_cryptography()) {
        Ok(_) => Ok(()),
        Err(TlsError::InconsistentKeys(_)) => Err(invalid(
            "the client's private key belongs to another certificate: pass the key that its certificate was made with",
        )),
        Err(error) => Err(invalid(format!("the client's certificate and private key: {error}"))),
    }
}

fn certificates(pem: &[u8], owner: &str) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|error| invalid(format!("{owner} certificate: {error}")))?;
    if all.is_empty() {
        return Err(invalid(format!(
            "{owner} certificate: the text has no PEM block `CERTIFICATE`; convert another format with `openssl x509`"
        )));
    }
    Ok(all)
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, ConfigError> {
    let has = |text: &[u8]| pem.windows(text.len()).any(|part| part == text);
    // In PKCS #8, and in the traditional format of OpenSSL.
    if has(b"BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED") {
        return Err(invalid("the client's private key is encrypted: decrypt it with `openssl pkey -in FILE`"));
    }
    // The error must not contain parts of the text, which may be a key.
    PrivateKeyDer::from_pem_slice(pem).map_err(|_| {
        invalid("the client's private key: the text has no PEM block `PRIVATE KEY`; convert another format with `openssl pkey`")
    })
}

fn invalid(reason: impl fmt::Display) -> ConfigError {
    ConfigError::InvalidCertificate { reason: reason.to_string() }
}

/// The default `CryptoProvider` of the process. Installs `ring` if there is none.
pub(crate) fn provide_cryptography() -> Arc<CryptoProvider> {
    if let Some(provider) = CryptoProvider::get_default() {
        return Arc::clone(provider);
    }
    // If another thread was faster, its provider is used.
    let _ = ring::default_provider().install_default();
    CryptoProvider::get_default().map_or_else(|| Arc::new(ring::default_provider()), Arc::clone)
}

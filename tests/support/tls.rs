//! Certificates that are made for one test, and servers that show them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use super::server::{RedisServer, binary, free_port};

/// An authority, and what it has signed: a certificate for a server and one for a client. PEM files in a folder that goes
/// with the value.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    /// For a server that is known by the names and addresses given, for instance `["localhost", "127.0.0.1"]`.
    pub fn for_names(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.distinguished_name.push(DnType::CommonName, "authority of a test");
        let key = KeyPair::generate().expect("a key can be made");
        let authority = CertifiedIssuer::self_signed(authority, key).expect("an authority can sign itself");
        fs::write(folder.path().join("ca.crt"), authority.pem()).expect("a certificate can be written");
        for (file, names) in [("server", names), ("client", &["client"])] {
            let key = KeyPair::generate().expect("a key can be made");
            let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
            let mut params = CertificateParams::new(names).expect("these are names");
            params.distinguished_name.push(DnType::CommonName, file);
            let certificate = params.signed_by(&key, &authority).expect("the authority signs");
            for (ending, pem) in [("crt", certificate.pem()), ("key", key.serialize_pem())] {
                fs::write(folder.path().join(format!("{file}.{ending}")), pem).expect("a file can be written");
            }
        }
        Self { folder }
    }

    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    pub fn client_certificate(&self) -> PathBuf {
        self.folder.path().join("client.crt")
    }

    pub fn client_key(&self) -> PathBuf {
        self.folder.path().join("client.key")
    }

    /// Arguments of a server that speaks TLS on `port`, and wants to see a certificate of its clients if `mutual`.
    pub fn args(&self, port: u16, mutual: bool) -> Vec<String> {
        let file = |name: &str| self.folder.path().join(name).to_string_lossy().into_owned();
        [
            ("--tls-port", port.to_string()),
            ("--tls-cert-file", file("server.crt")),
            ("--tls-key-file", file("server.key")),
            ("--tls-ca-cert-file", file("ca.crt")),
            ("--tls-auth-clients", (if mutual { "yes" } else { "no" }).to_owned()),
        ]
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
    }
}

/// A server that speaks TLS on a port of its own. The plain port is for the harness.
#[derive(Debug)]
pub struct TlsServer {
    pub server: RedisServer,
    pub certificates: Certificates,
    tls_port: u16,
}

impl TlsServer {
    /// A server for 127.0.0.1 and `localhost`; a `mutual` one refuses clients without a certificate.
    pub fn start(mutual: bool) -> Self {
        Self::start_with(Certificates::for_names(&["localhost", "127.0.0.1"]), mutual)
    }

    pub fn start_with(certificates: Certificates, mutual: bool) -> Self {
        let tls_port = free_port();
        let args = certificates.args(tls_port, mutual);
        let server = RedisServer::start_with(&args.iter().map(String::as_str).collect::<Vec<_>>());
        Self { server, certificates, tls_port }
    }

    pub fn tls_port(&self) -> u16 {
        self.tls_port
    }

    /// `rediss://localhost:port/`.
    pub fn url(&self) -> String {
        format!("rediss://localhost:{}/", self.tls_port)
    }
}

/// Whether the server to test can speak TLS at all: some are built without.
pub fn is_supported() -> bool {
    // It names the first setting that it does not know.
    let args = ["--port", "0", "--tls-auth-clients", "yes", "--no-such-setting", "1"];
    let output = Command::new(binary()).args(args).output().expect("the server can be run");
    [output.stdout, output.stderr].iter().any(|text| String::from_utf8_lossy(text).contains("no-such-setting"))
}

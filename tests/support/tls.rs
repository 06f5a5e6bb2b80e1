//! Certificates for tests, and servers that use them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;

use super::sentinel::SERVICE;
use super::server::{RedisServer, binary, free_port, wait_until, words};

/// An authority, with a certificate that it has signed for a server and one for a client. The PEM files are in a folder that is removed
/// with the value.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    /// For a server with these names and addresses, for instance `["localhost", "127.0.0.1"]`.
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
            for (kind, pem) in [("crt", certificate.pem()), ("key", key.serialize_pem())] {
                fs::write(folder.path().join(format!("{file}.{kind}")), pem).expect("a file can be written");
            }
        }
        Self { folder }
    }

    /// A server certificate that is its own authority, as `openssl req -x509` makes it.
    pub fn self_signed(names: &[&str]) -> Self {
        let made = Self::for_names(names);
        let mut params = CertificateParams::new(names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
            .expect("these are names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key can be made");
        let certificate = params.self_signed(&key).expect("a certificate can be signed");
        for (file, text) in
            [("ca.crt", certificate.pem()), ("server.crt", certificate.pem()), ("server.key", key.serialize_pem())]
        {
            fs::write(made.folder.path().join(file), text).expect("a file can be written");
        }
        made
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

    /// Arguments of a server that speaks TLS on `port`, and requires client certificates if `mutual`.
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

/// A server with a TLS port. The plain port is for the harness.
#[derive(Debug)]
pub struct TlsServer {
    pub server: RedisServer,
    pub certificates: Certificates,
    tls_port: u16,
}

impl TlsServer {
    /// A server for 127.0.0.1 and `localhost`. If `mutual`, it refuses clients without a certificate.
    pub fn start(mutual: bool) -> Self {
        Self::start_with(Certificates::for_names(&["localhost", "127.0.0.1"]), mutual)
    }

    pub fn start_with(certificates: Certificates, mutual: bool) -> Self {
        Self::start_as(certificates, mutual, &[])
    }

    /// A cluster of one node.
    pub fn start_cluster() -> Self {
        Self::start_cluster_with(Certificates::for_names(&["localhost", "127.0.0.1"]), &[])
    }

    /// Like [`start_cluster`](Self::start_cluster), with further arguments.
    pub fn start_cluster_with(certificates: Certificates, more: &[&str]) -> Self {
        let mut args = vec!["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--tls-cluster", "yes"];
        args.extend(more);
        let node = Self::start_as(certificates, true, &args);
        let slots: Vec<_> = (0..16_384).map(|slot| slot.to_string()).collect();
        node.server.query::<()>(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")));
        wait_until("the cluster is up", || node.server.text("CLUSTER INFO").contains("cluster_state:ok"));
        node
    }

    /// A server with further arguments.
    pub fn start_as(certificates: Certificates, mutual: bool, more: &[&str]) -> Self {
        assert!(is_supported(), "{} is built without TLS, and cannot be tested with it", binary());
        let mut tls_port = 0;
        let server = RedisServer::start_with_each(|| {
            tls_port = free_port();
            let more = more.iter().map(|&arg| arg.to_owned());
            certificates.args(tls_port, mutual).into_iter().chain(more).collect()
        });
        Self { server, certificates, tls_port }
    }

    /// A Sentinel that speaks only TLS with this server, and the TLS port of the Sentinel. Its password is `watch`.
    pub fn sentinel(&self) -> (RedisServer, u16) {
        for _ in 0..10 {
            let (port, tls_port) = (free_port(), free_port());
            let mut config = format!(
                "port {port}\nbind 127.0.0.1\ntls-replication yes\nsentinel monitor {SERVICE} 127.0.0.1 {} 1\n",
                self.tls_port
            );
            for pair in self.certificates.args(tls_port, true).chunks_exact(2) {
                config += &format!("{} {}\n", pair[0].trim_start_matches('-'), pair[1]);
            }
            let folder = tempfile::tempdir().expect("a temporary folder can be made");
            fs::write(folder.path().join("sentinel.conf"), config).expect("a file can be written");
            if let Some(sentinel) =
                RedisServer::try_start(port, words("sentinel.conf --requirepass watch --sentinel"), folder)
            {
                let mut connection = redis::Client::open(format!("redis://:watch@127.0.0.1:{port}/"))
                    .and_then(|client| client.get_connection())
                    .expect("the Sentinel accepts the password");
                wait_until("the Sentinel sees the server", || {
                    let known: String = redis::cmd("INFO").arg("sentinel").query(&mut connection).unwrap_or_default();
                    known.contains("status=ok,address=127.0.0.1")
                });
                return (sentinel, tls_port);
            }
        }
        panic!("the Sentinel does not start");
    }

    pub fn tls_port(&self) -> u16 {
        self.tls_port
    }

    /// `rediss://localhost:port/`.
    pub fn url(&self) -> String {
        format!("rediss://localhost:{}/", self.tls_port)
    }
}

/// Whether the server under test supports TLS. Some are built without it.
fn is_supported() -> bool {
    // The process ends because it has no certificate, or earlier if it is built without TLS. Since 7.2, a server without TLS accepts the
    // settings all the same.
    let output = Command::new(binary()).args(["--port", "0", "--tls-port", "1"]).output();
    let output = output.expect("the server can be run");
    [output.stdout, output.stderr].iter().any(|text| String::from_utf8_lossy(text).contains("No tls-cert-file"))
}

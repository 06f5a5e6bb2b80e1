use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, RedisError};

use super::RedisBackend;
#[cfg(feature = "tls")]
use super::certificates;
use super::cluster::{Address, Cluster, Connectors};
use super::connect_error::{Attempt, Peer};
use super::connection::connect::{Connector, unhindered};
use super::connection::pool::{Pool, PoolOptions};
use super::connection::pubsub::{Listened, Source};
use super::connection::runtime::RuntimeHandle;
use super::keys::Keys;
use super::replicated::Replicated;
use super::sentinel::{self, Sentinels};
use super::topology::{CarefulLane, CarefulServers, ConnectMode, Connections, Purpose, Servers};
use super::url::Target;
use crate::error::{ConfigError, ConnectError};

/// How to reach Redis, and what to call things there.
///
/// ```no_run
/// use tollgate::RedisOptions;
///
/// # #[tokio::main] async fn main() -> Result<(), tollgate::ConnectError> {
/// let backend = RedisOptions::from_url("redis://127.0.0.1/")?.prefix("shop").connect().await?;
/// # Ok(())
/// # }
/// ```
///
/// What a URL should not say or cannot:
///
/// ```no_run
/// # #[cfg(feature = "tls")] mod example {
/// use tollgate::RedisOptions;
///
/// # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = RedisOptions::from_url("rediss+sentinel://10.0.0.1,10.0.0.2,10.0.0.3/orders")?
///     .user("shop", std::env::var("REDIS_PASSWORD")?)
///     .sentinel_user("", std::env::var("SENTINEL_PASSWORD")?)
///     .ca_certificate(std::fs::read("ca.pem")?)
///     .client_certificate(std::fs::read("shop.pem")?, std::fs::read("shop.key")?)
///     .connect()
///     .await?;
/// # Ok(())
/// # }
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedisOptions {
    origin: Origin,
    prefix: String,
    connections: u32,
    connect_timeout: Duration,
    response_timeout: Duration,
    tolerates_outage: bool,
    #[cfg(feature = "tls")]
    certificates: redis::TlsCertificates,
}

#[derive(Clone)]
enum Origin {
    Target(Box<Target>),
    Pool(bb8::Pool<RedisConnectionManager>),
}

/// A few are enough, since each is shared by all callers and the server has one thread for all of them. Not as many as there are full calls on their
/// way ([`check_batcher`](super::batch::check)): with four and 256 decisions in flight a sixth fewer are made than with three or five.
const DEFAULT_CONNECTIONS: u32 = 3;

/// All of them are opened at the start, and a server accepts 10,000 clients by default.
const MAX_CONNECTIONS: u32 = 1_024;

pub(crate) const fn check_connections(connections: u32) -> Result<(), ConfigError> {
    match connections {
        1..=MAX_CONNECTIONS => Ok(()),
        _ => Err(ConfigError::ConnectionsOutOfRange { connections, max: MAX_CONNECTIONS }),
    }
}

pub(crate) const fn check_timeout(setting: &'static str, timeout: Duration) -> Result<(), ConfigError> {
    if timeout.is_zero() { Err(ConfigError::ZeroTimeout { setting }) } else { Ok(()) }
}

impl RedisOptions {
    /// Reaches the servers that a URL names, with the settings that its parameters name. [`connect`](crate::connect) has the table of both.
    ///
    /// A setting in code replaces that of the URL: after `from_url("redis://host/?prefix=a")?.prefix("b")` the prefix is `b`. Only a URL
    /// chooses the servers, the database and the protocol.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidUrl`], [`ConfigError::UnknownScheme`] or [`ConfigError::FeatureMissing`], and
    /// [`ConfigError::ConnectionsOutOfRange`] or [`ConfigError::ZeroTimeout`] for parameters out of range. None of them repeats
    /// a user name or a password. Nothing is contacted yet.
    pub fn from_url(url: impl AsRef<str>) -> Result<Self, ConfigError> {
        let (target, parameters) = Target::parse(url.as_ref())?;
        let options = Self::new(Origin::Target(Box::new(target)));
        Ok(Self {
            prefix: parameters.prefix.unwrap_or(options.prefix),
            connections: parameters.connections.unwrap_or(options.connections),
            connect_timeout: parameters.connect_timeout.unwrap_or(options.connect_timeout),
            response_timeout: parameters.response_timeout.unwrap_or(options.response_timeout),
            ..options
        })
    }

    /// Connects as a pool does that the program has already: see [`RedisBackend::from_pool`].
    pub fn from_pool(pool: bb8::Pool<RedisConnectionManager>) -> Self {
        Self::new(Origin::Pool(pool))
    }

    fn new(origin: Origin) -> Self {
        Self {
            origin,
            prefix: "tollgate".to_owned(),
            connections: DEFAULT_CONNECTIONS,
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_millis(500),
            tolerates_outage: false,
            #[cfg(feature = "tls")]
            certificates: redis::TlsCertificates { client_tls: None, root_cert: None },
        }
    }

    /// The user of the server's access control list, and the password. Replaces what the URL says; an empty name is the default
    /// user. Not for options [from a pool](Self::from_pool), which has its own.
    pub fn user(mut self, name: impl AsRef<str>, password: impl AsRef<str>) -> Self {
        if let Origin::Target(target) = &mut self.origin {
            target.log_in(|redis| with_user(redis, name.as_ref(), password.as_ref()));
        }
        self
    }

    /// The user of the Sentinels, and the password, where they want one. An empty name is the default user. Without effect where
    /// there are no Sentinels.
    pub fn sentinel_user(mut self, name: impl AsRef<str>, password: impl AsRef<str>) -> Self {
        if let Origin::Target(target) = &mut self.origin
            && let Target::Sentinel { sentinel, .. } = &mut **target
        {
            *sentinel = with_user(sentinel.clone(), name.as_ref(), password.as_ref());
        }
        self
    }

    /// Trusts servers whose certificate one of these authorities has signed (PEM), and no others. By default those that the
    /// operating system trusts. For the encrypted schemes.
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn ca_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.root_cert = Some(pem.into());
        self
    }

    /// Shows this certificate to servers, and proves with the private key that it is ours (both PEM). For the encrypted schemes.
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn client_certificate(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        let tls = redis::ClientTlsConfig { client_cert: certificate.into(), client_key: key.into() };
        self.certificates.client_tls = Some(tls);
        self
    }

    /// What the name of every key begins with. Defaults to `tollgate`. Programs with the same prefix on the same database
    /// share their counts. Take a short one of letters, digits, `-`, `_`, `.` and `:`; any other byte is percent-encoded, and
    /// what is longer than [`Key::MAX_LEN`](crate::Key::MAX_LEN) bytes then is replaced by its digest.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How many connections to keep to each server: 1 to 1,024. Defaults to 3, each of which serves any number of requests at once.
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// How long it may take to open a connection, logging in and asking Sentinels included. Defaults to 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long one command may go unanswered. Defaults to 500 ms.
    ///
    /// The backstop for calls without a deadline of their own. A [`Limiter`](crate::Limiter) and a layer have one, which is
    /// shorter by default. The claims of a [worker](crate::DelayQueueWorker) may go unanswered for as long as it waits for them: a third of its
    /// lease, from 100 ms to 5 s, or for this if it is longer.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Whether [`connect`](Self::connect) has a backend to give also while Redis is down, so that a program can be started then. Defaults to false.
    ///
    /// Until Redis answers, each call fails as it does in an outage, with what is said for that ([`OnStoreError`](crate::OnStoreError)): by
    /// default each process enforces its limits by itself, and locks and idempotency refuse. Connections are opened when something is asked of the
    /// store, and on a cluster its nodes are looked for meanwhile. What `connect` says of a server that will not do is said by the first calls
    /// then, and nothing about eviction.
    ///
    /// Only that nobody answers, or a server cannot serve yet or has no room for another client, is tolerated, with a warning in the log: wrong
    /// credentials and whatever else a server says stay errors, and so does the name of a service that no Sentinel which answers knows. A mistake that
    /// can never work is an error too: encryption on one side only, a certificate, or an HTTP server in the place of Redis. With options
    /// [from a pool](Self::from_pool) that has a password, a server without room may be taken for one that refuses the password, and be an error too.
    pub fn tolerate_outage(mut self, tolerates_outage: bool) -> Self {
        self.tolerates_outage = tolerates_outage;
        self
    }

    /// Connects, and makes sure that Redis lets us in, is recent enough and runs scripts for us.
    ///
    /// On a cluster, `connect` opens connections to all nodes that serve slots, at the addresses that they announce. If all of
    /// them fail, or one fails because of its certificate or the credentials, the error names the address and the remedy. One
    /// node that is down beside others is a warning in the log.
    ///
    /// If the reason of a failure is not clear, two more connections find out whether the server speaks Redis, TLS or HTTP. They
    /// take half a second each at most, and carry no credentials.
    ///
    /// Where the user may run `INFO`, a `maxmemory-policy` that can evict our keys is a warning in the log.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Config`] for settings that cannot work: [`ConfigError::ConnectionsOutOfRange`],
    /// [`ConfigError::ZeroTimeout`], [`ConfigError::InvalidCertificate`]. The other kinds of [`ConnectError`] if no connection could be opened within the
    /// connect timeout, if the server or we are not who we should be, or if the server is not one that will do. A service that has to start while
    /// Redis is down is one for [`tolerate_outage`](Self::tolerate_outage).
    pub async fn connect(mut self) -> Result<RedisBackend, ConnectError> {
        check_connections(self.connections)?;
        check_timeout("connect_timeout", self.connect_timeout)?;
        check_timeout("response_timeout", self.response_timeout)?;
        self.connect_timeout = self.connect_timeout.min(LONGEST_TIMEOUT);
        self.response_timeout = self.response_timeout.min(LONGEST_TIMEOUT);
        #[cfg(feature = "tls")]
        self.check_certificates()?;
        let keys = Keys::new(&self.prefix);
        let attempt = self.attempt();
        let options = self.clone();
        let started = async {
            let links = options.links(ConnectMode::Connected, &attempt).await?;
            RedisBackend::new(links, &attempt.peer, keys.clone()).await
        };
        match started.await {
            Err(error) if self.tolerates_outage && is_outage(&error) => {
                warn_of_outage(&error);
                Ok(RedisBackend::unseen(self.links(ConnectMode::Disconnected, &attempt).await?, keys))
            }
            started => started,
        }
    }

    fn attempt(&self) -> Attempt {
        let peer = match &self.origin {
            Origin::Pool(_) => Peer::Pool,
            Origin::Target(target) => match &**target {
                Target::Server(info) => Peer::Server(info.addr().clone()),
                Target::Sentinel { service, .. } => Peer::Service(service.clone()),
                Target::Cluster { .. } => Peer::Cluster,
            },
        };
        #[cfg(feature = "tls")]
        let (is_encrypted, has_client_certificate) =
            (matches!(&self.origin, Origin::Target(target) if target.is_tls()), self.certificates.client_tls.is_some());
        #[cfg(not(feature = "tls"))]
        let (is_encrypted, has_client_certificate) = (false, false);
        Attempt { peer, timeout: self.connect_timeout, is_encrypted, has_client_certificate }
    }

    async fn links(self, start: ConnectMode, attempt: &Attempt) -> Result<Connections, ConnectError> {
        let Self { origin, connections, connect_timeout, response_timeout, .. } = &self;
        let (connections, connect_timeout, patience) = (*connections, *connect_timeout, *response_timeout);
        let home = Arc::new(RuntimeHandle::here());
        let terms = PoolOptions { connect: connect_timeout, response: patience, home: Arc::clone(&home) };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(Some(*response_timeout))
            .set_pipeline_buffer_size(PIPELINE_BUFFER);
        let target = match origin {
            Origin::Target(target) => &**target,
            Origin::Pool(pool) => {
                let connector = Connector::Pool { pool: pool.clone(), response_timeout: *response_timeout };
                return to_one(connector, connections, terms, start, attempt).await;
            }
        };
        let connector = match target {
            Target::Server(info) => {
                let client = self.client(info.clone()).map_err(|error| unusable(&error))?;
                Connector::Client(Box::new((client, config)))
            }
            Target::Sentinel { sentinels, service, redis, sentinel } => {
                let client =
                    |address: &ConnectionAddr| info(address.clone(), sentinel).and_then(|info| self.client(info));
                let clients = sentinels.iter().map(client).collect::<Result<_, _>>();
                let clients = clients.map_err(|error| unusable(&error))?;
                let (service, redis) = (service.clone(), redis.clone());
                let open: sentinel::Opener =
                    Box::new(move |(host, port)| self.client(info(self.address(host.clone(), *port), &redis)?));
                Connector::Sentinels(Arc::new(Sentinels::new(&service, clients, open, config, connect_timeout)))
            }
            Target::Cluster { seeds, redis } => {
                let infos = seeds.iter().map(|seed| info(seed.clone(), redis)).collect::<Result<Vec<_>, _>>();
                let infos = infos.map_err(|error| unusable(&error))?;
                // What is wrong with a certificate is wrong with it for all nodes.
                for info in &infos {
                    self.client(info.clone()).map_err(|error| unusable(&error))?;
                }
                let seeds: Vec<_> = seeds.iter().filter_map(address).collect();
                let redis = redis.clone();
                let connectors: Connectors = Box::new(move |(host, port)| {
                    let address = self.address(host.clone(), *port);
                    let client = self.client(info(address, &redis)?)?;
                    Ok(Connector::Client(Box::new((client, config.clone()))))
                });
                let cluster = match Cluster::open(seeds, connectors, connections, terms, start).await {
                    Ok(cluster) => Arc::new(cluster),
                    Err(error) => return Err(attempt.failed(error).await),
                };
                if start == ConnectMode::Connected {
                    check_nodes(&cluster, attempt).await?;
                }
                let servers = Listened::Cluster(Arc::clone(&cluster));
                return Ok(Connections {
                    requests: Servers::Cluster(Arc::clone(&cluster), Purpose::Requests),
                    apart: Servers::Cluster(Arc::clone(&cluster), Purpose::Dedicated),
                    grants: CarefulServers::Cluster(Arc::clone(&cluster), CarefulLane::Grants),
                    renewals: CarefulServers::Cluster(cluster, CarefulLane::Renewals),
                    patience,
                    source: Source { servers, connect_timeout, response_timeout: patience },
                    home,
                });
            }
        };
        to_one(connector, connections, terms, start, attempt).await
    }

    /// A client for one server, which has not contacted it yet.
    fn client(&self, info: ConnectionInfo) -> Result<Client, RedisError> {
        // What the client library is called is nothing that a user needs a permission for, and each refusal would be in the server's log.
        let settings = info.redis_settings().clone().set_skip_set_lib_name();
        let info = info.set_redis_settings(settings).set_tcp_settings(unhindered());
        #[cfg(feature = "tls")]
        if let ConnectionAddr::TcpTls { .. } = info.addr() {
            certificates::provide_cryptography();
            if self.has_certificates() {
                return Client::build_with_tls(info, self.certificates.clone());
            }
        }
        Client::open(info)
    }

    fn address(&self, host: String, port: u16) -> ConnectionAddr {
        #[cfg(feature = "tls")]
        if matches!(&self.origin, Origin::Target(target) if target.is_tls()) {
            return ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
        }
        ConnectionAddr::Tcp(host, port)
    }

    #[cfg(feature = "tls")]
    fn check_certificates(&self) -> Result<(), ConfigError> {
        if let Some(authority) = &self.certificates.root_cert {
            certificates::check_authority(authority)?;
        }
        if let Some(client) = &self.certificates.client_tls {
            certificates::check_client(&client.client_cert, &client.client_key)?;
        }
        match &self.origin {
            Origin::Target(target) if target.is_tls() => Ok(()),
            _ if self.has_certificates() => {
                Err(ConfigError::InvalidCertificate { reason: "only `rediss:` URLs encrypt".to_owned() })
            }
            _ => Ok(()),
        }
    }

    #[cfg(feature = "tls")]
    fn has_certificates(&self) -> bool {
        self.certificates.root_cert.is_some() || self.certificates.client_tls.is_some()
    }
}

/// Whether it may be over by itself.
fn is_outage(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Store(failure) if failure.error().is_unavailable() || failure.error().is_timeout())
}

/// Makes sure that the addresses which the nodes announce can be used. A node that is only down is left to its replicas, as long as there is
/// another one; what is wrong for good with one of them is wrong at the start.
async fn check_nodes(cluster: &Cluster, attempt: &Attempt) -> Result<(), ConnectError> {
    let (nodes, failed) = cluster.connected().await;
    let all_failed = failed.len() == nodes;
    for (_, error) in failed {
        let error = attempt.failed(error).await;
        if all_failed || !is_outage(&error) {
            return Err(error);
        }
        warn_of_node(&error);
    }
    Ok(())
}

// Apart, since the fields of a log line cannot be sent to other threads.
fn warn_of_outage(error: &ConnectError) {
    let cause = error.source().map(tracing::field::display);
    tracing::warn!(%error, cause, "redis cannot be reached at the start");
}

fn warn_of_node(error: &ConnectError) {
    let cause = error.source().map(tracing::field::display);
    tracing::warn!(%error, cause, "a node of the redis cluster cannot be reached at the start");
}

async fn to_one(
    connector: Connector,
    connections: u32,
    terms: PoolOptions,
    start: ConnectMode,
    attempt: &Attempt,
) -> Result<Connections, ConnectError> {
    let siblings = Arc::default();
    let requests = match start {
        ConnectMode::Connected => match Pool::open(connector.clone(), connections, terms.clone(), &siblings).await {
            Ok(pool) => pool,
            Err(error) => return Err(attempt.failed(error).await),
        },
        ConnectMode::Disconnected => Pool::eager(connector.clone(), connections, terms.clone(), &siblings),
    };
    let apart = Pool::lazy(connector.clone(), 1, terms.clone(), &siblings);
    let [grants, renewals] =
        [(); 2].map(|()| CarefulServers::One(Replicated::new(connector.clone(), connections, terms.clone())));
    let (requests, apart) = (Servers::One(requests), Servers::One(apart));
    let servers = Listened::One(connector);
    let source = Source { servers, connect_timeout: terms.connect, response_timeout: terms.response };
    Ok(Connections { requests, apart, grants, renewals, patience: terms.response, home: terms.home, source })
}

fn with_user(redis: RedisConnectionInfo, name: &str, password: &str) -> RedisConnectionInfo {
    let login = RedisConnectionInfo::default().set_db(redis.db()).set_protocol(redis.protocol()).set_password(password);
    if name.is_empty() { login } else { login.set_username(name) }
}

fn info(address: ConnectionAddr, redis: &RedisConnectionInfo) -> Result<ConnectionInfo, RedisError> {
    // An address by itself is always well-formed.
    redis::IntoConnectionInfo::into_connection_info(address).map(|info| info.set_redis_settings(redis.clone()))
}

fn address(address: &ConnectionAddr) -> Option<Address> {
    match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Some((host.clone(), *port)),
        _ => None,
    }
}

/// A client could not be made of the settings.
fn unusable(error: &RedisError) -> ConfigError {
    ConfigError::InvalidCertificate { reason: error.to_string() }
}

/// As good as for ever, and instants can be told that are as far away.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How many commands may wait to be written to one connection before the next caller has to wait for a place. The client's
/// own default of 50 is fewer than the callers that one connection is meant to serve.
const PIPELINE_BUFFER: usize = 1_024;

impl fmt::Debug for RedisOptions {
    // What it is made from is left out, and so are the certificates: they hold the password and the private key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisOptions")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .field("tolerates_outage", &self.tolerates_outage)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connecting_may_move_between_threads() {
        fn portable<T: Send>(_: T) {}
        portable(RedisOptions::from_url("redis+cluster://127.0.0.1/").unwrap().connect());
    }

    /// A connection that many share had one call on its way at a time.
    #[test]
    fn calls_do_not_wait_for_each_other_on_their_way() {
        let options = RedisOptions::from_url("redis://127.0.0.1/").unwrap();
        let Origin::Target(target) = &options.origin else { panic!("it is a URL") };
        let Target::Server(info) = &**target else { panic!("it is one server") };
        let client = options.client(info.clone()).unwrap();
        assert!(client.get_connection_info().tcp_settings().nodelay());
    }
}

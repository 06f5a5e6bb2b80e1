use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bb8_redis::RedisConnectionManager;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, RedisError};

use super::RedisBackend;
use super::address::Address;
#[cfg(feature = "tls")]
use super::certificates;
use super::cluster::{Cluster, ConnectorFactory};
use super::connect_error::Attempt;
use super::connection::connect::tcp_nodelay;
use super::connection::connector::Connector;
use super::connection::pool::{Pool, PoolOptions};
use super::connection::pubsub::{Publishers, Source};
use super::connection::runtime::RuntimeHandle;
use super::keys::Keys;
use super::option_checks::{check_connections, check_timeout};
use super::peer::Peer;
use super::purpose::{ConnectMode, Purpose, ReplicatedPurpose};
use super::replicated::Replicated;
use super::sentinel::{self, Sentinels};
use super::topology::{Connections, ReplicatedServers, Servers};
use super::url::Target;
use crate::error::{ConfigError, ConnectError};

/// Options for connecting to Redis, and the prefix of the keys.
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
/// Credentials and certificates, which do not belong in a URL:
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

/// All callers share the connections, and the server has one thread for all of them, so a few are enough. Not 4: with 256
/// checks in flight, 4 connections had a sixth less throughput than 3 or 5. 4 is also the number of full
/// [batches](super::batch::check) in flight.
const DEFAULT_CONNECTIONS: u32 = 3;

impl RedisOptions {
    /// Options from a URL: its servers, and the settings of its parameters. [`connect`](crate::connect) lists both.
    ///
    /// A setter replaces the setting of the URL: after `from_url("redis://host/?prefix=a")?.prefix("b")` the prefix is `b`. Only the URL
    /// selects the servers, the database and the protocol.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidUrl`], [`ConfigError::UnknownScheme`] or [`ConfigError::FeatureMissing`], and for parameters out of range
    /// [`ConfigError::ConnectionsOutOfRange`] or [`ConfigError::ZeroTimeout`]. The errors never contain a password that is
    /// encoded as URLs require. Does not contact a server.
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

    /// Connects like your pool: see [`RedisBackend::from_pool`].
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

    /// Sets the ACL user of the server, and the password. Replaces the login of the URL; an empty name is the default user. Ignored for
    /// options [from a pool](Self::from_pool), which has its own login.
    pub fn user(mut self, name: impl AsRef<str>, password: impl AsRef<str>) -> Self {
        if let Origin::Target(target) = &mut self.origin {
            target.change_login(|redis| with_login(redis, name.as_ref(), password.as_ref()));
        }
        self
    }

    /// Sets the user and password of the Sentinels, if they require a login. An empty name is the default user. Ignored without
    /// Sentinels.
    pub fn sentinel_user(mut self, name: impl AsRef<str>, password: impl AsRef<str>) -> Self {
        if let Origin::Target(target) = &mut self.origin
            && let Target::Sentinel { sentinel, .. } = &mut **target
        {
            *sentinel = with_login(sentinel.clone(), name.as_ref(), password.as_ref());
        }
        self
    }

    /// Trusts only servers whose certificate one of these CAs has signed (PEM). Defaults to the CAs that the operating system trusts. For
    /// the encrypted schemes.
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn ca_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.root_cert = Some(pem.into());
        self
    }

    /// Authenticates with this client certificate and its private key (both PEM). For the encrypted schemes.
    #[cfg(feature = "tls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls")))]
    pub fn client_certificate(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        let tls = redis::ClientTlsConfig { client_cert: certificate.into(), client_key: key.into() };
        self.certificates.client_tls = Some(tls);
        self
    }

    /// Sets the prefix of all keys. Defaults to `tollgate`. Programs with the same prefix on the same database share their data. Use a
    /// short prefix of letters, digits, `-`, `_`, `.` and `:`. Any other byte is percent-encoded. A prefix that is then longer than
    /// [`Key::MAX_LEN`](crate::Key::MAX_LEN) bytes is replaced by its digest.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the number of connections to each server: 1 to 1,024. Defaults to 3. Each connection serves any number of concurrent requests.
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the timeout for opening a connection, including login and Sentinel queries. Defaults to 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets the timeout for the reply to one command. Defaults to 500 ms.
    ///
    /// It is the backstop for calls without their own deadline. A [`Limiter`](crate::Limiter) and a layer have a deadline, which is
    /// shorter by default. The claims of a [worker](crate::DelayQueueWorker) have a timeout of a third of the lease, from 100 ms to 5 s,
    /// or this timeout if it is longer.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Whether [`connect`](Self::connect) returns a backend while Redis is down, so that your program can start. Defaults to `false`.
    ///
    /// Until Redis replies, each call fails as in an outage, so [`RateLimitFallback`](crate::RateLimitFallback) applies. By default each
    /// process enforces its rate limits locally, and locks and idempotency reject requests. Without a cluster, the client tries to open
    /// connections in the background at once, and again for later calls. On a cluster, the client keeps looking for nodes in the
    /// background. No check of the server follows: if the server is unsupported, calls fail with a store error. The warning about eviction
    /// is not logged.
    ///
    /// Only these failures are tolerated, with a warning in the log: no server replies, a server cannot serve yet, or it has no room for
    /// another client. These remain errors:
    ///
    /// * wrong credentials, and every other error reply
    /// * a service name that no replying Sentinel knows
    /// * mistakes that can never work: encryption on one side only, a bad certificate, an HTTP server in place of Redis
    ///
    /// If options [from a pool](Self::from_pool) have a password, a server without room for another client can look like a rejected
    /// password. This is an error, too.
    pub fn tolerate_outage(mut self, tolerates_outage: bool) -> Self {
        self.tolerates_outage = tolerates_outage;
        self
    }

    /// Connects, and checks the login and the permissions that every user needs. If the user may run `INFO`, it also checks the version of
    /// the server, and logs a warning if `maxmemory-policy` can evict keys.
    ///
    /// On a cluster, `connect` opens connections to all nodes that serve slots, at the addresses that they announce. It fails if all nodes
    /// fail, or if one node fails because of a mistake that waiting cannot end, such as its certificate or the credentials. The error names
    /// the address and the remedy. If only some nodes are down, the log has a warning for each.
    ///
    /// If the cause of a failure is unclear, one or two more connections find out whether the server speaks Redis, TLS or HTTP. Each takes
    /// at most 0.5 s, and sends no credentials.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Config`] for settings that cannot work: [`ConfigError::ConnectionsOutOfRange`], [`ConfigError::ZeroTimeout`],
    /// [`ConfigError::InvalidCertificate`]. The other kinds of [`ConnectError`] if no connection could be opened within the connect
    /// timeout, if authentication failed on either side, or if the server is unsupported. If your service must start while Redis is
    /// down, see [`tolerate_outage`](Self::tolerate_outage).
    pub async fn connect(mut self) -> Result<RedisBackend, ConnectError> {
        check_connections(self.connections)?;
        check_timeout("connect_timeout", self.connect_timeout)?;
        check_timeout("response_timeout", self.response_timeout)?;
        self.connect_timeout = self.connect_timeout.min(MAX_TIMEOUT);
        self.response_timeout = self.response_timeout.min(MAX_TIMEOUT);
        #[cfg(feature = "tls")]
        self.check_certificates()?;
        let keys = Keys::new(&self.prefix);
        let attempt = self.attempt();
        let options = self.clone();
        let connected = async {
            let connections = options.open_connections(ConnectMode::Connected, &attempt).await?;
            RedisBackend::new(connections, &attempt.peer, keys.clone()).await
        };
        match connected.await {
            Err(error) if self.tolerates_outage && is_outage(&error) => {
                log_outage(&error);
                Ok(RedisBackend::unchecked(self.open_connections(ConnectMode::Disconnected, &attempt).await?, keys))
            }
            connected => connected,
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

    async fn open_connections(self, mode: ConnectMode, attempt: &Attempt) -> Result<Connections, ConnectError> {
        let Self { origin, connections, connect_timeout, response_timeout, .. } = &self;
        let (connections, connect_timeout, response_timeout) = (*connections, *connect_timeout, *response_timeout);
        let runtime = Arc::new(RuntimeHandle::here());
        let pool_options =
            PoolOptions { connect: connect_timeout, response: response_timeout, runtime: Arc::clone(&runtime) };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(Some(response_timeout))
            .set_pipeline_buffer_size(PIPELINE_BUFFER);
        let target = match origin {
            Origin::Target(target) => &**target,
            Origin::Pool(pool) => {
                let connector = Connector::Pool { pool: pool.clone(), response_timeout };
                return connect_single(connector, connections, pool_options, mode, attempt).await;
            }
        };
        let connector = match target {
            Target::Server(info) => {
                let client = self.client(info.clone()).map_err(|error| invalid_certificate(&error))?;
                Connector::Client(Box::new((client, config)))
            }
            Target::Sentinel { sentinels, service, redis, sentinel } => {
                let client =
                    |address: &ConnectionAddr| info(address.clone(), sentinel).and_then(|info| self.client(info));
                let clients = sentinels.iter().map(client).collect::<Result<_, _>>();
                let clients = clients.map_err(|error| invalid_certificate(&error))?;
                let (service, redis) = (service.clone(), redis.clone());
                let open: sentinel::ClientFactory =
                    Box::new(move |(host, port)| self.client(info(self.address(host.clone(), *port), &redis)?));
                Connector::Sentinels(Arc::new(Sentinels::new(&service, clients, open, config, connect_timeout)))
            }
            Target::Cluster { seeds, redis } => {
                let infos = seeds.iter().map(|seed| info(seed.clone(), redis)).collect::<Result<Vec<_>, _>>();
                let infos = infos.map_err(|error| invalid_certificate(&error))?;
                // All nodes use the same certificates, so a bad one is an error before the first connection.
                for info in &infos {
                    self.client(info.clone()).map_err(|error| invalid_certificate(&error))?;
                }
                let seeds: Vec<_> = seeds.iter().filter_map(address).collect();
                let redis = redis.clone();
                let connectors: ConnectorFactory = Box::new(move |(host, port)| {
                    let address = self.address(host.clone(), *port);
                    let client = self.client(info(address, &redis)?)?;
                    Ok(Connector::Client(Box::new((client, config.clone()))))
                });
                let cluster = match Cluster::open(seeds, connectors, connections, pool_options, mode).await {
                    Ok(cluster) => Arc::new(cluster),
                    Err(error) => return Err(attempt.failed(error).await),
                };
                if mode == ConnectMode::Connected {
                    check_nodes(&cluster, attempt).await?;
                }
                return Ok(connections_to_cluster(cluster, connect_timeout, response_timeout, runtime));
            }
        };
        connect_single(connector, connections, pool_options, mode, attempt).await
    }

    /// A client for one server. Does not contact it yet.
    fn client(&self, info: ConnectionInfo) -> Result<Client, RedisError> {
        // Skips `CLIENT SETINFO`: it would need another permission, and each refusal would be in the server's log.
        let settings = info.redis_settings().clone().set_skip_set_lib_name();
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp_nodelay());
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

/// Whether the failure can end without a change of settings.
fn is_outage(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Store(failure) if failure.error().is_unavailable() || failure.error().is_timeout())
}

fn connections_to_cluster(
    cluster: Arc<Cluster>,
    connect_timeout: Duration,
    response_timeout: Duration,
    runtime: Arc<RuntimeHandle>,
) -> Connections {
    let servers = Publishers::Cluster(Arc::clone(&cluster));
    Connections {
        requests: Servers::Cluster(Arc::clone(&cluster), Purpose::Requests),
        dedicated: Servers::Cluster(Arc::clone(&cluster), Purpose::Dedicated),
        grants: ReplicatedServers::Cluster(Arc::clone(&cluster), ReplicatedPurpose::Grants),
        renewals: ReplicatedServers::Cluster(cluster, ReplicatedPurpose::Renewals),
        response_timeout,
        source: Source { servers, connect_timeout, response_timeout },
        runtime,
    }
}

/// Checks that the announced addresses of the nodes work. If a node is down and others are up, its replicas take over. A permanent
/// mistake at one node fails the start.
async fn check_nodes(cluster: &Cluster, attempt: &Attempt) -> Result<(), ConnectError> {
    let (nodes, failed) = cluster.connected().await;
    let all_failed = failed.len() == nodes;
    for (_, error) in failed {
        let error = attempt.failed(error).await;
        if all_failed || !is_outage(&error) {
            return Err(error);
        }
        log_node_outage(&error);
    }
    Ok(())
}

// A separate function, since the fields of a log event are not `Send`.
fn log_outage(error: &ConnectError) {
    let cause = error.source().map(tracing::field::display);
    tracing::warn!(%error, cause, "redis cannot be reached at the start");
}

fn log_node_outage(error: &ConnectError) {
    let cause = error.source().map(tracing::field::display);
    tracing::warn!(%error, cause, "a node of the redis cluster cannot be reached at the start");
}

async fn connect_single(
    connector: Connector,
    connections: u32,
    pool_options: PoolOptions,
    mode: ConnectMode,
    attempt: &Attempt,
) -> Result<Connections, ConnectError> {
    let server_state = Arc::default();
    let requests = match mode {
        ConnectMode::Connected => {
            match Pool::open(connector.clone(), connections, pool_options.clone(), &server_state).await {
                Ok(pool) => pool,
                Err(error) => return Err(attempt.failed(error).await),
            }
        }
        ConnectMode::Disconnected => Pool::eager(connector.clone(), connections, pool_options.clone(), &server_state),
    };
    let dedicated = Pool::lazy(connector.clone(), 1, pool_options.clone(), &server_state);
    let [grants, renewals] =
        [(); 2].map(|()| ReplicatedServers::One(Replicated::new(connector.clone(), connections, pool_options.clone())));
    let (requests, dedicated) = (Servers::One(requests), Servers::One(dedicated));
    let servers = Publishers::One(connector);
    let source = Source { servers, connect_timeout: pool_options.connect, response_timeout: pool_options.response };
    Ok(Connections {
        requests,
        dedicated,
        grants,
        renewals,
        response_timeout: pool_options.response,
        runtime: pool_options.runtime,
        source,
    })
}

fn with_login(redis: RedisConnectionInfo, name: &str, password: &str) -> RedisConnectionInfo {
    let login = RedisConnectionInfo::default().set_db(redis.db()).set_protocol(redis.protocol()).set_password(password);
    if name.is_empty() { login } else { login.set_username(name) }
}

fn info(address: ConnectionAddr, redis: &RedisConnectionInfo) -> Result<ConnectionInfo, RedisError> {
    // A bare address is always well-formed.
    redis::IntoConnectionInfo::into_connection_info(address).map(|info| info.set_redis_settings(redis.clone()))
}

fn address(address: &ConnectionAddr) -> Option<Address> {
    match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Some((host.clone(), *port)),
        _ => None,
    }
}

/// The error for settings that the client library rejects: only a certificate can be the cause.
fn invalid_certificate(error: &RedisError) -> ConfigError {
    ConfigError::InvalidCertificate { reason: error.to_string() }
}

/// In practice unlimited, and still representable as an `Instant`.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How many commands can be queued for one connection before the next caller has to wait. The client library's default of 50 is too
/// small for the callers that share one connection.
const PIPELINE_BUFFER: usize = 1_024;

impl fmt::Debug for RedisOptions {
    // Leaves out the origin and the certificates, which contain the password and the private key.
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
    fn connect_future_is_send() {
        fn is_send<T: Send>(_: T) {}
        is_send(RedisOptions::from_url("redis+cluster://127.0.0.1/").unwrap().connect());
    }

    /// Regression: without `TCP_NODELAY`, a shared connection had one call in flight at a time.
    #[test]
    fn clients_set_tcp_nodelay() {
        let options = RedisOptions::from_url("redis://127.0.0.1/").unwrap();
        let Origin::Target(target) = &options.origin else { panic!("it is a URL") };
        let Target::Server(info) = &**target else { panic!("it is one server") };
        let client = options.client(info.clone()).unwrap();
        assert!(client.get_connection_info().tcp_settings().nodelay());
    }
}

//! The servers that messages name.

use std::fmt;

use redis::ConnectionAddr;

/// A server, by its role.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    Server(ConnectionAddr),
    /// The current primary of a service.
    Service(String),
    Sentinel(ConnectionAddr),
    /// The primary that the Sentinels announce.
    Primary(ConnectionAddr),
    /// A node that the URL names.
    Seed(ConnectionAddr),
    /// A node that the cluster announces.
    Node(ConnectionAddr),
    /// Any node.
    Cluster,
    Pool,
}

/// Names the server for messages, without user and password.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(address) => write!(f, "redis at {}", Address(address)),
            Self::Service(name) => write!(f, "the primary of `{name}`"),
            Self::Sentinel(address) => write!(f, "the Sentinel at {}", Address(address)),
            Self::Primary(address) => write!(f, "the primary that the Sentinels announce at {}", Address(address)),
            Self::Seed(address) => write!(f, "the cluster node at {}", Address(address)),
            Self::Node(address) => write!(f, "the cluster node that is announced at {}", Address(address)),
            Self::Cluster => f.write_str("the cluster"),
            Self::Pool => f.write_str("the server of the pool"),
        }
    }
}

struct Address<'a>(&'a ConnectionAddr);

impl fmt::Display for Address<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
                write!(f, "[{host}]:{port}")
            }
            address => fmt::Display::fmt(address, f),
        }
    }
}

impl Peer {
    pub(crate) const fn address(&self) -> Option<&ConnectionAddr> {
        match self {
            Self::Server(address)
            | Self::Sentinel(address)
            | Self::Primary(address)
            | Self::Seed(address)
            | Self::Node(address) => Some(address),
            Self::Service(_) | Self::Cluster | Self::Pool => None,
        }
    }

    /// How to announce another address.
    pub(crate) const fn announcement(&self) -> Option<&'static str> {
        match self {
            Self::Node(_) => Some(
                "make that address reachable from this machine, or have the nodes announce another one (`cluster-announce-ip`, \
                 `cluster-announce-port`, `cluster-announce-hostname`)",
            ),
            Self::Primary(_) => Some(
                "make that address reachable from this machine, or have the Sentinels announce another one (`sentinel monitor`, \
                 `replica-announce-ip`)",
            ),
            _ => None,
        }
    }
}

use ::http::Request;

use super::model::{Header, KeyDef, KeyPart};
use crate::http::{BasicUserKey, BearerTokenKey, ClientIp, HeaderKey, PeerIp, basic_user, bearer_token, peer_ip};
use crate::key::{ExtractKey, Key, Or, first_of};

/// The key of a policy in a rules file.
#[derive(Clone, Debug)]
pub(super) enum RuleKey {
    GlobalKey,
    PeerIp(PeerIp),
    ClientIp(ClientIp),
    BearerToken(BearerTokenKey),
    BasicUser(BasicUserKey),
    Header(HeaderKey),
    FirstOf(Box<Or<RuleKey, RuleKey>>),
}

impl RuleKey {
    pub(super) fn new(def: &KeyDef, client_ip: &ClientIp) -> Self {
        let part = |part: &KeyPart| match part {
            KeyPart::Global => Self::GlobalKey,
            KeyPart::PeerIp => Self::PeerIp(peer_ip()),
            KeyPart::ClientIp => Self::ClientIp(client_ip.clone()),
            KeyPart::BearerToken => Self::BearerToken(bearer_token()),
            KeyPart::BasicUser => Self::BasicUser(basic_user()),
            KeyPart::Header(Header(name)) => Self::Header(HeaderKey::named(name.clone())),
        };
        let first_of = |first, fallback| Self::FirstOf(Box::new(first_of(first, fallback)));
        def.0.iter().map(part).reduce(first_of).unwrap_or(Self::GlobalKey)
    }
}

impl<B> ExtractKey<Request<B>> for RuleKey {
    fn extract_key(&self, request: &Request<B>) -> Option<Key> {
        match self {
            Self::GlobalKey => Some(Key::GLOBAL),
            Self::PeerIp(key) => key.extract_key(request),
            Self::ClientIp(key) => key.extract_key(request),
            Self::BearerToken(key) => key.extract_key(request),
            Self::BasicUser(key) => key.extract_key(request),
            Self::Header(key) => key.extract_key(request),
            Self::FirstOf(key) => key.extract_key(request),
        }
    }
}

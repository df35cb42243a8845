//! Who may name keys, read their standing and reset them: on loopback anyone, beyond it whoever can show it.

use std::net::IpAddr;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use ipnet::IpNet;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// Decides who is trusted with keys that are not their own.
#[derive(Debug)]
pub(crate) struct Access {
    open: bool,
    token_digests: Vec<[u8; 32]>,
    trusted: Vec<IpNet>,
}

impl Access {
    /// `open` for listeners that only this machine can reach.
    pub(crate) fn new(open: bool, token_digests: Vec<[u8; 32]>, trusted: Vec<IpNet>) -> Self {
        Self { open, token_digests, trusted }
    }

    /// Whether a caller may name keys. `peer` is the connection's other end, never what a header says.
    #[inline]
    pub(crate) fn may_name_keys(&self, peer: IpAddr, headers: &HeaderMap) -> bool {
        self.open || self.trusts(peer) || self.knows_token(headers)
    }

    fn trusts(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted.iter().any(|net| net.contains(&peer))
    }

    /// Compares digests, all of them and in constant time, so that an answer's time tells nothing.
    fn knows_token(&self, headers: &HeaderMap) -> bool {
        let Some(token) =
            headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "))
        else {
            return false;
        };
        let digest: [u8; 32] = Sha256::digest(token).into();
        let known =
            self.token_digests.iter().fold(Choice::from(0), |known, token| known | digest.ct_eq(token));
        known.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(token: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, format!("Bearer {token}").parse().expect("a header"))])
    }

    #[test]
    fn beyond_loopback_a_token_or_a_trusted_network_is_needed() {
        let digests = vec![Sha256::digest("correct horse battery").into()];
        let access = Access::new(false, digests, vec!["10.1.0.0/16".parse().expect("a network")]);
        let [far, near, mapped] =
            ["192.0.2.1", "10.1.2.3", "::ffff:10.1.2.3"].map(|ip| ip.parse().expect("an address"));
        assert!(!access.may_name_keys(far, &HeaderMap::new()));
        assert!(!access.may_name_keys(far, &bearer("wrong horse battery..")));
        assert!(!access.may_name_keys(far, &bearer("")));
        assert!(access.may_name_keys(far, &bearer("correct horse battery")));
        assert!(access.may_name_keys(near, &HeaderMap::new()));
        assert!(access.may_name_keys(mapped, &HeaderMap::new()));
    }
}

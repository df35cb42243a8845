//! Who sent a request, found out once from its head.

use std::net::IpAddr;

use http::Request;

use super::problem::Problem;
use crate::access::{Access, Refused};
use crate::address::{Client, client, is_proxy};
use crate::config::ClientAddress;

/// Who sent a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    /// The client's address.
    pub(super) client: Client,
    /// Whether the caller is a trusted proxy, whose headers are believed.
    pub(super) is_proxy: bool,
    may_name_keys: bool,
}

impl Caller {
    pub(super) fn new<B>(
        request: &Request<B>,
        peer: IpAddr,
        access: &Access,
        proxies: &ClientAddress,
    ) -> Self {
        let headers = request.headers();
        let client = client(proxies, peer, headers);
        Self {
            client,
            is_proxy: is_proxy(proxies, client),
            may_name_keys: access.may_name_keys(peer, headers, proxies),
        }
    }

    /// Fails for a caller who may not name keys, nor say who somebody else is.
    pub(super) fn authorize(&self) -> Result<(), Problem> {
        match self.may_name_keys {
            true => Ok(()),
            false => Err(Refused::KeyNotAllowed.into()),
        }
    }
}

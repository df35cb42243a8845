//! The messages of Envoy's Rate Limit Service. `cargo xtask protos` generates them from the files in `proto`.

pub(crate) use self::envoy::config::core::v3::HeaderValue;
pub(crate) use self::envoy::extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor};
pub(crate) use self::envoy::service::ratelimit::v3::{
    RateLimitRequest, RateLimitResponse, rate_limit_response,
};
pub(crate) use self::envoy::r#type::v3::RateLimitUnit;

/// The descriptions of these messages and of the service, for reflection.
pub(super) const DESCRIPTORS: &[u8] = include_bytes!("proto/descriptors.bin");

#[allow(clippy::all, unreachable_pub, reason = "generated")]
mod envoy {
    pub(crate) mod config {
        pub(crate) mod core {
            pub(crate) mod v3 {
                include!("proto/envoy.config.core.v3.rs");
            }
        }
    }
    pub(crate) mod extensions {
        pub(crate) mod common {
            pub(crate) mod ratelimit {
                pub(crate) mod v3 {
                    include!("proto/envoy.extensions.common.ratelimit.v3.rs");
                }
            }
        }
    }
    pub(crate) mod service {
        pub(crate) mod ratelimit {
            pub(crate) mod v3 {
                include!("proto/envoy.service.ratelimit.v3.rs");
            }
        }
    }
    pub(crate) mod r#type {
        pub(crate) mod v3 {
            include!("proto/envoy.r#type.v3.rs");
        }
    }
}

//! The `Host` header, which every HTTP/1.1 request has exactly once.

use bytes::Bytes;
use http::header::HOST;
use http::{Request, Response, StatusCode, Version};
use http_body_util::Full;

use super::problem::Problem;

/// Refuses a request that a proxy in front could take for one of another host (RFC 9112 section 3.2).
pub(crate) fn refuse<B>(request: &Request<B>) -> Option<Response<Full<Bytes>>> {
    let hosts = request.headers().get_all(HOST).iter().count();
    let accepted = match request.version() {
        Version::HTTP_11 => hosts == 1,
        _ => hosts <= 1,
    };
    if accepted {
        return None;
    }
    let problem = Problem::new(StatusCode::BAD_REQUEST, "a request needs exactly one Host header");
    Some(problem.into_response())
}

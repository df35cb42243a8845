//! Bodies of requests, with their limits in bytes and in time.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Incoming};

use super::problem::Problem;

/// The whole body, if it is small enough and comes soon enough.
pub(super) async fn read(body: Incoming, most: usize, within: Duration) -> Result<Bytes, Problem> {
    let too_large =
        || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body may have at most {most} bytes"));
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    match tokio::time::timeout(within, Limited::new(body, most).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(why)) if why.is::<http_body_util::LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(Problem::new(StatusCode::BAD_REQUEST, "the body ended before it was complete")),
        Err(_) => Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body came too slowly")),
    }
}

//! The body of a request as it arrives.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::table::{Phase, Seat};

/// The body of a request. While a door waits for the rest of it, the connection can be closed for another one: nothing has been
/// decided yet.
pub(crate) struct Received {
    body: Incoming,
    seat: Arc<Seat>,
    is_awaited: bool,
}

impl Received {
    pub(super) fn new(body: Incoming, seat: Arc<Seat>) -> Self {
        Self { body, seat, is_awaited: false }
    }

    /// Notes that nothing more of the body is waited for.
    fn end(&mut self) {
        if std::mem::take(&mut self.is_awaited) {
            self.seat.enter(Phase::Answering);
        }
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        match &frame {
            Poll::Pending if !self.is_awaited => {
                self.is_awaited = true;
                self.seat.enter(Phase::Body);
            }
            Poll::Ready(None | Some(Err(_))) => self.end(),
            Poll::Pending | Poll::Ready(Some(Ok(_))) => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.end();
    }
}

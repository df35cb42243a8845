//! Doors: one protocol each, from bytes to a request and back. They call the limiter, and never each other.

pub(crate) mod http;
pub(crate) mod resp;
pub(crate) mod rls;

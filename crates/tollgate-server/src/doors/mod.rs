//! Doors: one protocol each, from bytes to checks and back. They never call each other.

pub(crate) mod actuator;
pub(crate) mod admin;
pub(crate) mod body;
mod check;
pub(crate) mod host;
mod json;
mod openapi;
mod pace;
mod problem;
pub(crate) mod rest;

//! What becomes of Tollgate when its parts fail. Three `tollgate` processes and a program that embeds the library share a real
//! store under load; something is broken; every decision is judged. `cargo xtask faults` runs the whole matrix.

mod fleet;
mod http;
mod judge;
pub mod lessee;
mod program;
mod record;
mod rig;
pub mod rows;
mod traffic;
pub mod worker;

pub use judge::{Claim, Finding, Kind};
pub use program::set_program;

//! Data that nodes share beside the states: membership, the pushed policy, and assigned tiers.

pub(super) mod control;
pub(super) mod membership;

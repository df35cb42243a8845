//! What the nodes of a store share beside the states: who is there, the policy that was pushed, and assigned tiers.

pub(super) mod control;
pub(super) mod membership;

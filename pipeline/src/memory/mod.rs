//! Memory that is allocated once and then handed around: arenas cut into owned slots, and the policy
//! that decides which experts keep one.

pub mod arena;
pub mod policy;

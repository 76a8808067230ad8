//! Weights on disk: open files, one read queue per disk, and the two sources a pass leases from.

mod error;
pub mod trace;

pub use error::StoreError;

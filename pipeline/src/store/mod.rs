//! Weights on disk: open files, one read queue per disk, and the two sources a pass leases from.

pub mod blocks;
pub mod disks;
mod embed;
mod error;
pub mod experts;
pub mod faulty;
pub mod files;
mod gather;
mod open;
pub mod pack;
mod pack_partial;
mod pack_write;
mod pread;
mod queue;
pub mod reader;
pub mod request;
pub mod stats;
pub mod throttled;
pub mod trace;
pub mod trunk;
mod uring;
mod vectors;

pub use error::StoreError;
pub use open::{Store, StoreOptions};
pub use pack::pack_sizes;
pub use pack_write::{PackOptions, PackSummary, pack_trunk, verify_pack};
pub use vectors::{ResidentVectors, load_vectors};

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod pack_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

//! Integration tests live in `tests/`; this library holds what they share.
#![allow(clippy::expect_used)]

pub mod binary;
pub mod corrupt;
pub mod documents;
pub mod harness;
pub mod reference;
pub mod resident;

//! The K3 executor: preset + model directory -> plan -> engine -> session -> tokens.
//!
//! The library prints nothing and never exits: it returns values and errors, and emits `tracing`
//! events. The border for users is `Engine` and `Session`; nobody above it knows a tensor.

pub mod batch;
pub mod causes;
pub mod chat;
pub mod conversation;
pub mod doctor;
pub mod engine;
pub mod forward;
pub mod generation;
pub mod machine;
pub mod memory;
pub mod model;
pub mod plan;
pub mod preset;
pub mod sample;
pub mod schedule;
pub mod session;
pub mod session_file;
pub mod source;
pub mod speculate;
pub mod state;
pub mod stats;
pub mod store;
pub mod team;
pub mod temporary;
pub mod tokenizer;
pub mod units;
pub mod workspace;

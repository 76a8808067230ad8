//! Integration tests, one binary.
// Helpers of tests are tests.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod batch;
mod conversation;
mod conversation_cli;
mod demo;
mod documents;
mod drafts;
mod engine;
mod forward;
mod full_scale;
mod golden_snapshots;
mod instruction_sets;
mod layer_vectors;
mod options;
mod refused_checkpoints;
mod refused_configs;
mod refused_inputs;
mod session_text;
mod sessions;

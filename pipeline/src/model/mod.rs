//! What a model directory holds: the configuration, the tensors, and which tensor plays which part.

mod binding;
pub mod check;
pub mod checkpoint_error;
pub mod config;
pub mod config_error;
pub mod config_json;
pub mod error;
mod fields;
mod files;
mod json;
pub mod layout;
pub mod open;
mod quantization;
pub mod shard;
pub mod shard_index;
pub mod synth;
pub mod tensors;

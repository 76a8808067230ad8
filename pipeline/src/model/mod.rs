//! What a model directory holds: the configuration, the tensors, and which tensor plays which part.

pub mod config;
pub mod layout;
pub mod tensors;

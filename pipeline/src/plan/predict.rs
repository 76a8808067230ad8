//! Time per token from bytes and rates: the slower of disk and memory, since they overlap.

use serde::Serialize;

use crate::units::Rate;

use super::Traffic;

/// Speeds that a prediction rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Reading from disk.
    pub disk: Rate,
    /// Reading weights from memory while computing, all threads together.
    pub memory: Option<Rate>,
}

/// Seconds per decoded token, without a single expert cache hit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Bytes read from disk over the disk's rate.
    pub disk_seconds: f64,
    /// Bytes touched over the memory's rate, where that is known.
    pub memory_seconds: Option<f64>,
    /// The larger of the two.
    pub seconds_per_token: f64,
}

impl Prediction {
    /// What these rates make of this traffic.
    #[must_use]
    pub fn new(traffic: &Traffic, rates: Rates) -> Self {
        let disk_seconds = rates.disk.seconds(traffic.disk_bytes_max());
        let memory_seconds = rates.memory.map(|rate| rate.seconds(traffic.touched_bytes));
        let seconds_per_token = memory_seconds.map_or(disk_seconds, |m| m.max(disk_seconds));
        Self { disk_seconds, memory_seconds, seconds_per_token }
    }
}

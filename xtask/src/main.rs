//! Project tasks: golden snapshots, verification, benchmarks, the gate.

fn main() {}

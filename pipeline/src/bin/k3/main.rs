//! The `k3` binary: argument parsing, printing, exit codes; nothing else.

fn main() {}

//! Integration tests, one binary.

mod forward;

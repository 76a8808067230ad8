//! Golden models and vectors: where they lie and how they are read.

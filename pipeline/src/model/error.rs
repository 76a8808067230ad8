//! Why a model directory was refused.

use thiserror::Error;

use super::config_error::ConfigError;

/// Why a model was not opened.
#[derive(Debug, Error)]
pub enum ModelError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

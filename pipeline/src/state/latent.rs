//! The latent cache of one MLA layer: `[c after norm | r]` per position, nothing expanded.

use k3_kernel::mla::Latent;

use crate::model::config::MlaConfig;

/// [context, kv_rank + rope] floats, position after position.
#[derive(Debug)]
pub struct LatentCache {
    data: Vec<f32>,
    rank: usize,
    width: usize,
}

impl LatentCache {
    /// Room for `context` positions.
    #[must_use]
    pub fn new(config: &MlaConfig, context: usize) -> Self {
        let data = vec![0.0; Self::floats(config, context)];
        Self { data, rank: config.kv_rank, width: config.latent_width() }
    }

    /// Floats of a cache.
    #[must_use]
    pub fn floats(config: &MlaConfig, context: usize) -> usize {
        context * config.latent_width()
    }

    /// True when the cache has the sizes of `config`.
    #[must_use]
    pub fn fits(&self, config: &MlaConfig, context: usize) -> bool {
        self.width == config.latent_width() && self.data.len() == Self::floats(config, context)
    }

    /// The first `len` positions as attention reads them.
    ///
    /// # Panics
    /// When `len` is more than the context.
    #[must_use]
    pub fn view(&self, len: usize) -> Latent<'_> {
        Latent { data: self.filled(len), rank: self.rank, rope: self.width - self.rank }
    }

    /// One position, to be written.
    ///
    /// # Panics
    /// When it is not below the context.
    pub fn position_mut(&mut self, position: usize) -> &mut [f32] {
        &mut self.data[position * self.width..][..self.width]
    }

    /// The first `len` positions, [len, width].
    ///
    /// # Panics
    /// When `len` is more than the context.
    #[must_use]
    pub fn filled(&self, len: usize) -> &[f32] {
        &self.data[..len * self.width]
    }

    /// The first `len` positions, to be written.
    ///
    /// # Panics
    /// When `len` is more than the context.
    pub fn filled_mut(&mut self, len: usize) -> &mut [f32] {
        &mut self.data[..len * self.width]
    }
}

//! Rows of the token embedding, read one by one as they are needed.

use std::sync::Arc;
use std::time::Instant;

use super::disks::{Client, Disks};
use super::error::StoreError;
use super::gather::read_each;
use super::request::Class;
use super::stats::{StoreCounters, add, add_time};
use super::vectors::to_f32;
use crate::memory::arena::SlotBuf;
use crate::model::layout::EMBED_NAME;
use crate::model::tensors::{Extent, MatrixExtent};
use crate::units::TokenId;

/// Reads embedding rows into f32.
pub(crate) struct EmbedReader {
    client: Client,
    slots: Vec<SlotBuf>,
    table: MatrixExtent,
    counters: Arc<StoreCounters>,
}

impl EmbedReader {
    pub(crate) fn new(
        disks: &Arc<Disks>,
        slots: Vec<SlotBuf>,
        table: MatrixExtent,
        counters: Arc<StoreCounters>,
    ) -> Self {
        Self { client: Client::new(disks, slots.len()), slots, table, counters }
    }

    /// `out`: [ids, E].
    pub(crate) fn read(&mut self, ids: &[TokenId], out: &mut [f32]) -> Result<(), StoreError> {
        let (vocab, cols, dtype) = (self.table.rows, self.table.cols, self.table.dtype);
        if let Some(&id) = ids.iter().find(|id| id.0 as usize >= vocab) {
            return Err(StoreError::UnknownToken { id, vocab });
        }
        if out.len() != ids.len() * cols {
            return Err(StoreError::EmbedOutput { expected: ids.len() * cols, got: out.len() });
        }
        let start = Instant::now();
        let table = self.table.extent;
        let bytes = (cols * dtype.bytes()) as u64;
        let row = |i: usize| {
            let offset = table.offset + u64::from(ids[i].0) * bytes;
            (Extent { file: table.file, offset, bytes }, None)
        };
        read_each(&mut self.client, Class::Demand, &mut self.slots, (ids.len(), row), |i, data| {
            let out = &mut out[i * cols..][..cols];
            to_f32(dtype, data, out);
            match out.iter().position(|v| !v.is_finite()) {
                None => Ok(()),
                Some(index) => Err(StoreError::NonFinite {
                    tensor: format!("{EMBED_NAME} row {}", ids[i]),
                    index,
                    value: out[index],
                }),
            }
        })?;
        add(&self.counters.embed_bytes, bytes * ids.len() as u64);
        add_time(&self.counters.embed_wait_ns, start.elapsed());
        Ok(())
    }
}

//! Read requests: which bytes go where in a slot.
//!
//! Bytes at file offset `o` always lie at `at + o % SLOT_ALIGN` in the slot, with `at` a multiple of
//! [`SLOT_ALIGN`]: whole sectors can then be read around them, and the sizes do not depend on whether
//! O_DIRECT is in force.

use std::ops::Range;

use super::error::StoreError;
use super::pack::BlockChecksum;
use crate::memory::arena::{SLOT_ALIGN, SlotBuf};
use crate::model::tensors::Extent;

/// Most runs of bytes that one request gathers: the six tensors of an expert.
pub const PIECES_MAX: usize = 6;

/// Which reads go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Somebody waits: experts after routing, embedding rows.
    Demand,
    /// Read ahead in the order of the schedule; fills every gap.
    Trunk,
}

/// One run of bytes and its place in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which bytes.
    pub extent: Extent,
    /// Where their sectors go, a multiple of [`SLOT_ALIGN`].
    pub at: usize,
}

impl Piece {
    /// Bytes between the start of the first sector and the first byte wanted.
    pub(crate) fn slack(&self) -> usize {
        (self.extent.offset % SLOT_ALIGN as u64) as usize
    }

    /// Where the wanted bytes lie in the slot.
    #[must_use]
    pub fn data(&self) -> Range<usize> {
        let start = self.at + self.slack();
        start..start + self.extent.bytes as usize
    }

    /// Bytes of the sectors.
    pub(crate) fn span(&self) -> usize {
        span(&self.extent)
    }
}

/// Bytes of the sectors that hold an extent.
pub(crate) fn span(extent: &Extent) -> usize {
    let slack = extent.offset % SLOT_ALIGN as u64;
    ((slack + extent.bytes).next_multiple_of(SLOT_ALIGN as u64)) as usize
}

/// Up to [`PIECES_MAX`] pieces, laid out one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    items: [Piece; PIECES_MAX],
    len: usize,
}

impl Pieces {
    /// A single run of bytes.
    #[must_use]
    pub fn one(extent: Extent) -> Self {
        Self { items: [Piece { extent, at: 0 }; PIECES_MAX], len: 1 }
    }

    /// Several runs, one after the other.
    #[must_use]
    pub fn gather(extents: &[Extent; PIECES_MAX]) -> Self {
        let mut at = 0;
        let items = extents.map(|extent| {
            let piece = Piece { extent, at };
            at += piece.span();
            piece
        });
        Self { items, len: PIECES_MAX }
    }

    /// The pieces.
    #[must_use]
    pub fn as_slice(&self) -> &[Piece] {
        &self.items[..self.len]
    }

    /// Bytes of a slot that holds them all.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.as_slice().last().map_or(0, |p| p.at + p.span())
    }

    /// Bytes wanted.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.as_slice().iter().map(|p| p.extent.bytes).sum()
    }
}

/// A read: the slot travels with it and comes back in the [`Completion`].
#[derive(Debug)]
pub struct Request {
    /// Its class.
    pub class: Class,
    /// What to read.
    pub pieces: Pieces,
    /// What the first piece must hash to; the reader thread compares.
    pub checksum: Option<BlockChecksum>,
    /// Where to.
    pub slot: SlotBuf,
    /// Given back with the completion.
    pub tag: u64,
}

/// A read that is over.
#[derive(Debug)]
pub struct Completion {
    /// The request's.
    pub tag: u64,
    /// The request's; its content counts only when `result` is `Ok`.
    pub slot: SlotBuf,
    /// How it ended.
    pub result: Result<(), StoreError>,
}

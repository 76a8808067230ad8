//! Tile operations, portable.

use crate::hn::{self, QUAD_BYTES, QUAD_COLS};
use crate::isa::scalar::Scalar;
use crate::lanes::{LANES, Lanes};
use crate::tile::{COLUMN_BYTES, TileLanes};
use crate::weights::TILE_ROWS;

impl TileLanes for Scalar {
    type Table = [u8; 16];

    #[inline(always)]
    fn bf16_column(self, column: &[u8; COLUMN_BYTES]) -> [Self::F; 2] {
        let (weights, _) = column.as_chunks::<2>();
        let widened = |r: usize| f32::from_bits(u32::from(u16::from_le_bytes(weights[r])) << 16);
        [core::array::from_fn(widened), core::array::from_fn(|r| widened(LANES + r))]
    }

    #[inline(always)]
    fn bf16_rows(self, rows: [&[u8; 16]; LANES]) -> [Self::F; 8] {
        let widened = |r: usize, c: usize| {
            f32::from_bits(u32::from_le_bytes([0, 0, rows[r][2 * c], rows[r][2 * c + 1]]))
        };
        core::array::from_fn(|c| core::array::from_fn(|r| widened(r, c)))
    }

    #[inline(always)]
    fn f32_column(self, column: &[u8; TILE_ROWS * 4]) -> [Self::F; 2] {
        let (words, _) = column.as_chunks::<4>();
        let values: [f32; TILE_ROWS] = core::array::from_fn(|r| f32::from_le_bytes(words[r]));
        [self.load(&values), self.load(&values[LANES..])]
    }

    #[inline(always)]
    fn rows(self, v: [Self::F; 2]) -> [f32; TILE_ROWS] {
        core::array::from_fn(|r| v[r / LANES][r % LANES])
    }

    #[inline(always)]
    fn hn_table(self, high: &[u8; 16]) -> Self::Table {
        *high
    }

    #[inline(always)]
    fn hn_columns(self, quad: &[u8; QUAD_BYTES], table: Self::Table) -> [[Self::F; 2]; QUAD_COLS] {
        let columns = hn::decode_quad(quad, &table);
        core::array::from_fn(|k| self.bf16_column(&columns[k]))
    }

    #[inline(always)]
    fn hn_decode(
        self,
        quad: &[u8; QUAD_BYTES],
        table: Self::Table,
        to: &mut [[u8; COLUMN_BYTES]; QUAD_COLS],
    ) {
        *to = hn::decode_quad(quad, &table);
    }

    #[inline(always)]
    fn transpose(self, from: &[&[u8; 16]; TILE_ROWS], to: &mut [[u8; COLUMN_BYTES]; 8]) {
        for (c, column) in to.iter_mut().enumerate() {
            for (weight, row) in column.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                *weight = [row[2 * c], row[2 * c + 1]];
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, _: &[u8], _: usize) {}

    #[inline(always)]
    fn prefetch_far(self, _: &[u8], _: usize) {}
}

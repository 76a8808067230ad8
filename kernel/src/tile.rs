//! Operations on a column of a tile: 16 weights, one for each row, in two vectors of 8 lanes.

use crate::hn::{QUAD_BYTES, QUAD_COLS};
use crate::lanes::{LANES, Lanes};
use crate::weights::TILE_ROWS;

/// Bytes of a column of a bf16 tile.
pub const COLUMN_BYTES: usize = TILE_ROWS * 2;

/// What an instruction set adds to [`Lanes`] for tiled matrices.
///
/// Which of the 16 rows is in which lane is the instruction set's own choice, the same for all
/// operations; [`TileLanes::rows`] puts them in order.
pub trait TileLanes: Lanes {
    /// The look-up table of the "hn" code, ready for use.
    type Table: Copy;

    /// A column of bf16 weights, widened exactly.
    fn bf16_column(self, column: &[u8; COLUMN_BYTES]) -> [Self::F; 2];
    /// 8 columns of 8 rows of bf16 weights, widened exactly: `v[c]` has row r in lane r.
    fn bf16_rows(self, rows: [&[u8; 16]; LANES]) -> [Self::F; 8];
    /// A column of little-endian f32 weights.
    fn f32_column(self, column: &[u8; TILE_ROWS * 4]) -> [Self::F; 2];
    /// The lanes in the order of the rows.
    fn rows(self, v: [Self::F; 2]) -> [f32; TILE_ROWS];

    /// The 16 high bytes of an "hn" code.
    fn hn_table(self, high: &[u8; 16]) -> Self::Table;
    /// The columns of 4 columns of an "hn" tile, escapes left as they come.
    fn hn_columns(self, quad: &[u8; QUAD_BYTES], table: Self::Table) -> [[Self::F; 2]; QUAD_COLS];

    /// The same 4 columns as bf16.
    fn hn_decode(self, quad: &[u8; QUAD_BYTES], table: Self::Table, to: &mut [[u8; COLUMN_BYTES]; QUAD_COLS]);

    /// `to[c]` = the 16 rows of column c, for the 8 columns whose bf16 weights stand in `from`, [row][column].
    fn transpose(self, from: &[&[u8; 16]; TILE_ROWS], to: &mut [[u8; COLUMN_BYTES]; 8]);

    /// Asks for the cache line of `bytes[at]`, if there is one, to have it in the nearest cache.
    fn prefetch(self, bytes: &[u8], at: usize);

    /// The same, to have it in the cache behind that: more such lines can be on their way.
    fn prefetch_far(self, bytes: &[u8], at: usize);
}

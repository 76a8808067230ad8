//! Dense products.

use crate::weights::{Bf16Rows, TILE_ROWS, tiled_bytes};

/// Tiles a matrix: `[tile][column][16 rows]`, the missing rows of the last tile +0.
///
/// # Panics
/// When `dst` is not [`tiled_bytes`] long.
pub fn tile_rows(src: Bf16Rows<'_>, dst: &mut [u8]) {
    assert_eq!(Ok(dst.len()), tiled_bytes(src.rows(), src.cols()), "bytes of the tiled form");
    let tile_bytes = src.cols() * TILE_ROWS * 2;
    for (index, tile) in dst.chunks_exact_mut(tile_bytes.max(1)).enumerate() {
        for r in 0..TILE_ROWS {
            let row = index * TILE_ROWS + r;
            let columns = tile.chunks_exact_mut(TILE_ROWS * 2).map(|column| &mut column[r * 2..r * 2 + 2]);
            if row < src.rows() {
                for (to, from) in columns.zip(src.row(row).chunks_exact(2)) {
                    to.copy_from_slice(from);
                }
            } else {
                columns.for_each(|to| to.fill(0));
            }
        }
    }
}

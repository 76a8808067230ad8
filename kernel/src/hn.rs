//! "hn": a lossless code for bf16 weights, three quarters of the size.
//!
//! The low byte of a weight is stored as it is. The high byte (sign and upper seven bits of the exponent)
//! takes one of few values in a trained matrix: a nibble says which of the matrix's 16 most frequent
//! ones it is, and the rest are *escapes*, listed with their positions. So decoding is a table look-up
//! of 16 entries, and every weight keeps its exact bits, whatever they are.
//!
//! All numbers are little endian. The code of a matrix of `rows` x `cols`:
//!
//! | bytes | what |
//! | --- | --- |
//! | 64 | header: `K3HN` and a version, rows u32, cols u32, escapes u32, zeros, at 32 the 16 high bytes, zeros |
//! | tiles * ceil(cols / 4) * 96 | for each tile of 16 rows, for each 4 columns: 64 low bytes, 32 bytes of nibbles |
//! | (tiles + 1) * 4 | first escape of each tile, and the number of all |
//! | escapes * 4 | high byte + 256 * (column * 16 + row of the tile), ascending within a tile |
//!
//! Within 4 columns, the low byte of column k (0..4), row r is at `32 * (k / 2) + 16 * (r / 8) + 8 * (k % 2) +
//! r % 8`; its nibble is in byte `that % 32` of the nibbles, the low one for k < 2. What pads rows and
//! columns is zero in both and no part of the matrix.

use core::fmt;
use core::ops::Range;

use crate::tile::COLUMN_BYTES;
use crate::weights::{Bf16Rows, ShapeError, TILE_ROWS, debug_as_shape, sized, tiled_bytes};

const MAGIC: [u8; 8] = *b"K3HN\x01\0\0\0";
const HEADER: usize = 64;
const TABLE: Range<usize> = 32..48;
/// Columns that are coded together.
pub(crate) const QUAD_COLS: usize = 4;
/// Bytes of 4 columns of one tile.
pub(crate) const QUAD_BYTES: usize = 96;
/// Positions within a tile have 24 bits.
const COLS_MAX: usize = 1 << 20;

fn u32_at(bytes: &[u8], index: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[index * 4..][..4]);
    u32::from_le_bytes(word)
}

/// Where the low byte of column k (0..4) and row r (0..16) lies within the 64 of 4 columns.
fn place(k: usize, r: usize) -> usize {
    32 * (k / 2) + 16 * (r / 8) + 8 * (k % 2) + r % 8
}

/// A weight whose high byte is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Escape {
    pub(crate) col: usize,
    pub(crate) row: usize,
    pub(crate) high: u8,
}

impl Escape {
    fn from_bytes(bytes: [u8; 4]) -> Self {
        let position = (u32::from_le_bytes(bytes) >> 8) as usize;
        Self { col: position / TILE_ROWS, row: position % TILE_ROWS, high: bytes[0] }
    }
}

/// A bf16 matrix in the "hn" code, checked.
#[derive(Clone, Copy)]
pub struct HnTiled<'a> {
    rows: usize,
    cols: usize,
    table: [u8; 16],
    body: &'a [u8],
    starts: &'a [u8],
    escapes: &'a [u8],
}

impl<'a> HnTiled<'a> {
    /// A view of what [`hn_encode`] wrote. Every byte that a kernel will go by is checked, so a damaged
    /// code can give wrong weights but never a read out of bounds.
    ///
    /// # Errors
    /// When the bytes are not such a code, are of another shape or length, or list impossible escapes.
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, ShapeError> {
        let length = |expected| ShapeError::Length {
            what: "the \"hn\" code of a matrix",
            rows,
            cols,
            expected,
            found: bytes.len(),
        };
        let Some((header, rest)) = bytes.split_at_checked(HEADER) else { return Err(length(HEADER)) };
        if let Some(offset) = (0..MAGIC.len()).find(|&i| header[i] != MAGIC[i]) {
            return Err(ShapeError::HnHeader { offset });
        }
        if let Some(offset) = (20..HEADER).find(|i| !TABLE.contains(i) && header[*i] != 0) {
            return Err(ShapeError::HnHeader { offset });
        }
        let found = (u32_at(header, 2) as usize, u32_at(header, 3) as usize);
        if found != (rows, cols) || cols > COLS_MAX {
            return Err(ShapeError::HnShape { expected: (rows, cols), found });
        }
        let tiles = rows.div_ceil(TILE_ROWS);
        let body = sized(tiles, cols.div_ceil(QUAD_COLS), QUAD_BYTES)?;
        let escapes = u32_at(header, 4) as usize;
        let lists = sized(tiles + 1, 1, 4)?.checked_add(sized(escapes, 1, 4)?);
        let expected = lists.and_then(|lists| lists.checked_add(body)).and_then(|n| n.checked_add(HEADER));
        match expected {
            None => return Err(ShapeError::TooLarge { rows, cols }),
            Some(expected) if expected != bytes.len() => return Err(length(expected)),
            Some(_) => {}
        }
        let (body, lists) = rest.split_at(body);
        let (starts, escapes) = lists.split_at((tiles + 1) * 4);
        let mut table = [0; 16];
        table.copy_from_slice(&header[TABLE]);
        let code = Self { rows, cols, table, body, starts, escapes };
        code.check_escapes()?;
        Ok(code)
    }

    fn check_escapes(&self) -> Result<(), ShapeError> {
        let all = self.escapes.len() / 4;
        let tiles = self.rows.div_ceil(TILE_ROWS);
        let mut start = 0;
        for tile in 0..=tiles {
            let next = u32_at(self.starts, tile) as usize;
            let in_order = if tile == 0 { next == 0 } else { start <= next };
            if !in_order || next > all || (tile == tiles && next != all) {
                return Err(ShapeError::HnEscape { tile });
            }
            if tile > 0 && !self.escapes_ascend(tile - 1, start, next) {
                return Err(ShapeError::HnEscape { tile: tile - 1 });
            }
            start = next;
        }
        Ok(())
    }

    /// Whether the escapes `start..end` lie in the tile, each after the one before.
    fn escapes_ascend(&self, tile: usize, start: usize, end: usize) -> bool {
        let rows = TILE_ROWS.min(self.rows - tile * TILE_ROWS);
        let mut from = 0;
        self.escapes.as_chunks::<4>().0[start..end].iter().all(|word| {
            let escape = Escape::from_bytes(*word);
            let position = escape.col * TILE_ROWS + escape.row;
            let fits = position >= from && escape.col < self.cols && escape.row < rows;
            from = position + 1;
            fits
        })
    }

    /// Rows, those of the padding not counted.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Weights that are listed apart.
    #[must_use]
    pub fn escape_count(&self) -> usize {
        self.escapes.len() / 4
    }

    /// The 16 high bytes.
    pub(crate) fn table(&self) -> &[u8; 16] {
        &self.table
    }

    /// One tile, 4 columns at a time.
    pub(crate) fn tile(&self, tile: usize) -> &'a [[u8; QUAD_BYTES]] {
        let quads = self.cols.div_ceil(QUAD_COLS);
        &self.body.as_chunks().0[tile * quads..][..quads]
    }

    /// The escapes in some columns of one tile, ascending by column, then row.
    pub(crate) fn escapes(&self, tile: usize, cols: Range<usize>) -> impl Iterator<Item = Escape> + use<'a> {
        let (start, end) = (u32_at(self.starts, tile) as usize, u32_at(self.starts, tile + 1) as usize);
        let words = &self.escapes.as_chunks::<4>().0[start..end];
        let before = |col: usize| words.partition_point(|word| Escape::from_bytes(*word).col < col);
        words[before(cols.start)..before(cols.end)].iter().map(|word| Escape::from_bytes(*word))
    }
}

debug_as_shape!(HnTiled);

/// Decodes 4 columns of a tile, escapes left as they come.
#[inline(always)]
pub(crate) fn decode_quad(quad: &[u8; QUAD_BYTES], table: &[u8; 16]) -> [[u8; COLUMN_BYTES]; QUAD_COLS] {
    let (low, nibbles) = quad.split_at(64);
    let mut columns = [[0; COLUMN_BYTES]; QUAD_COLS];
    for (k, column) in columns.iter_mut().enumerate() {
        for (r, weight) in column.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let at = place(k, r);
            let nibble = nibbles[at % 32] >> (4 * (k / 2)) & 15;
            *weight = [low[at], table[usize::from(nibble)]];
        }
    }
    columns
}

/// The tiled form, bit for bit what
/// [`Kernels::tile_rows`](crate::Kernels::tile_rows) makes of the matrix that was encoded.
///
/// # Panics
/// When `dst` is not [`tiled_bytes`] long.
pub fn hn_decode(src: &HnTiled<'_>, dst: &mut [u8]) {
    assert_eq!(Ok(dst.len()), tiled_bytes(src.rows, src.cols), "bytes of the tiled form");
    let (columns, _) = dst.as_chunks_mut::<COLUMN_BYTES>();
    for (index, tile) in columns.chunks_exact_mut(src.cols.max(1)).enumerate() {
        for (quad, columns) in src.tile(index).iter().zip(tile.chunks_mut(QUAD_COLS)) {
            columns.copy_from_slice(&decode_quad(quad, &src.table)[..columns.len()]);
        }
        for escape in src.escapes(index, 0..src.cols) {
            tile[escape.col][escape.row * 2 + 1] = escape.high;
        }
        let rows = TILE_ROWS.min(src.rows - index * TILE_ROWS);
        for column in tile {
            column[rows * 2..].fill(0);
        }
    }
}

/// Bytes that [`hn_encode`] may want of its `dst`: a code is kept only when it is smaller than the tiles.
///
/// # Errors
/// When they cannot be addressed.
pub fn hn_encoded_max(rows: usize, cols: usize) -> Result<usize, ShapeError> {
    tiled_bytes(rows, cols)
}

/// The 16 most frequent high bytes, ties to the smaller one, and how many weights have another.
fn choose_table(src: &Bf16Rows<'_>) -> ([u8; 16], usize) {
    let mut counts = [0usize; 256];
    for row in 0..src.rows() {
        for weight in src.row(row).chunks_exact(2) {
            counts[usize::from(weight[1])] += 1;
        }
    }
    let mut order: [u8; 256] = core::array::from_fn(|i| i as u8);
    order.sort_unstable_by_key(|&high| (core::cmp::Reverse(counts[usize::from(high)]), high));
    let mut table = [0; 16];
    table.copy_from_slice(&order[..16]);
    let covered: usize = table.iter().map(|&high| counts[usize::from(high)]).sum();
    (table, src.rows() * src.cols() - covered)
}

/// Encodes a matrix; the bytes written. `None` when the code would not be smaller than the tiled form,
/// does not fit in `dst`, or the matrix has more than 2^20 columns or 2^32 rows.
#[must_use]
pub fn hn_encode(src: Bf16Rows<'_>, dst: &mut [u8]) -> Option<usize> {
    let (rows, cols) = (u32::try_from(src.rows()).ok()?, u32::try_from(src.cols()).ok()?);
    if src.cols() > COLS_MAX {
        return None;
    }
    let (table, escapes) = choose_table(&src);
    let tiles = src.rows().div_ceil(TILE_ROWS);
    let tile_bytes = src.cols().div_ceil(QUAD_COLS) * QUAD_BYTES;
    let total = HEADER + tiles * tile_bytes + 4 * (tiles + 1) + 4 * escapes;
    if total >= tiled_bytes(src.rows(), src.cols()).ok()? {
        return None;
    }
    let escape_count = u32::try_from(escapes).ok()?;
    let dst = dst.get_mut(..total)?;
    dst.fill(0);
    let (header, rest) = dst.split_at_mut(HEADER);
    header[..8].copy_from_slice(&MAGIC);
    for (at, value) in [(8, rows), (12, cols), (16, escape_count)] {
        header[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    header[TABLE].copy_from_slice(&table);
    let (body, lists) = rest.split_at_mut(tiles * tile_bytes);
    let (starts, mut list) = lists.split_at_mut(4 * (tiles + 1));
    let mut nibble_of = [None; 256];
    for (nibble, &high) in (0u8..).zip(&table) {
        nibble_of[usize::from(high)] = Some(nibble);
    }
    let mut written = 0u32;
    for tile in 0..tiles {
        starts[tile * 4..][..4].copy_from_slice(&written.to_le_bytes());
        let escaped = encode_tile(&src, tile, &nibble_of, &mut body[tile * tile_bytes..][..tile_bytes], list);
        list = &mut list[escaped * 4..];
        written += escaped as u32;
    }
    starts[tiles * 4..].copy_from_slice(&written.to_le_bytes());
    Some(total)
}

/// Encodes one tile into zeroed bytes; the number of escapes it wrote to `list`.
fn encode_tile(
    src: &Bf16Rows<'_>,
    tile: usize,
    nibble_of: &[Option<u8>; 256],
    body: &mut [u8],
    list: &mut [u8],
) -> usize {
    let first = tile * TILE_ROWS;
    let rows = TILE_ROWS.min(src.rows() - first);
    let mut sources = [&[][..]; TILE_ROWS];
    for (r, source) in sources[..rows].iter_mut().enumerate() {
        *source = src.row(first + r);
    }
    let mut escaped = 0;
    for col in 0..src.cols() {
        let quad = &mut body[col / QUAD_COLS * QUAD_BYTES..][..QUAD_BYTES];
        let k = col % QUAD_COLS;
        for (r, source) in sources[..rows].iter().enumerate() {
            let (low, high) = (source[col * 2], source[col * 2 + 1]);
            let at = place(k, r);
            quad[at] = low;
            match nibble_of[usize::from(high)] {
                Some(nibble) => quad[64 + at % 32] |= nibble << (4 * (k / 2)),
                None => {
                    let word = ((col * TILE_ROWS + r) as u32) << 8 | u32::from(high);
                    list[escaped * 4..][..4].copy_from_slice(&word.to_le_bytes());
                    escaped += 1;
                }
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests;

//! Checked views of weight bytes.
//!
//! A view is made once, at the border, from bytes and a shape; holding it is the proof that the bytes
//! fit the shape, so kernels do not look again. No alignment is asked of the bytes.

use core::fmt;

pub use crate::hn::HnTiled;
use crate::tile::COLUMN_BYTES;

/// Rows of one tile of [`Bf16Tiled`] and [`HnTiled`].
pub const TILE_ROWS: usize = 16;

/// Columns that share one scale byte in MXFP4.
pub const GROUP_COLS: usize = 32;

/// Why bytes are not a matrix of the shape asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShapeError {
    /// The number of bytes does not fit the shape.
    Length {
        /// What the bytes are.
        what: &'static str,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Bytes that such a matrix has.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The shape has more bytes than can be addressed.
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// MXFP4 columns come in groups of 32.
    Group {
        /// Columns asked for.
        cols: usize,
    },
    /// The "hn" code does not begin as it must, or is of another version.
    HnHeader {
        /// Byte of the code where the fault is.
        offset: usize,
    },
    /// The "hn" code is of a matrix of another shape.
    HnShape {
        /// Rows and columns asked for.
        expected: (usize, usize),
        /// Rows and columns that the code states.
        found: (usize, usize),
    },
    /// The list of escapes of a tile of the "hn" code is out of order or out of range.
    HnEscape {
        /// Tile of 16 rows.
        tile: usize,
    },
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { what, rows, cols, expected, found } => {
                write!(f, "{what} of {rows} x {cols} has {expected} bytes, found {found}")
            }
            Self::TooLarge { rows, cols } => write!(f, "a matrix of {rows} x {cols} cannot be addressed"),
            Self::Group { cols } => {
                write!(f, "an MXFP4 matrix has a multiple of {GROUP_COLS} columns, found {cols}")
            }
            Self::HnHeader { offset } => {
                write!(f, "not an \"hn\" code of this version (header byte {offset} differs)")
            }
            Self::HnShape { expected, found } => write!(
                f,
                "the \"hn\" code is of a matrix of {} x {}, expected {} x {}",
                found.0, found.1, expected.0, expected.1
            ),
            Self::HnEscape { tile } => {
                write!(f, "the escapes of tile {tile} of the \"hn\" code are out of order or out of range")
            }
        }
    }
}

impl core::error::Error for ShapeError {}

/// Product of a shape and an element size, checked.
pub(crate) fn sized(rows: usize, cols: usize, bytes: usize) -> Result<usize, ShapeError> {
    rows.checked_mul(cols).and_then(|n| n.checked_mul(bytes)).ok_or(ShapeError::TooLarge { rows, cols })
}

fn exact(
    what: &'static str,
    bytes: &[u8],
    expected: usize,
    (rows, cols): (usize, usize),
) -> Result<(), ShapeError> {
    if bytes.len() == expected {
        Ok(())
    } else {
        Err(ShapeError::Length { what, rows, cols, expected, found: bytes.len() })
    }
}

/// `Debug` prints the shape, never the bytes.
macro_rules! debug_as_shape {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({} x {})", stringify!($name), self.rows(), self.cols())
            }
        }
    )*};
}
pub(crate) use debug_as_shape;

/// A bf16 matrix as released: row-major, little endian.
#[derive(Clone, Copy)]
pub struct Bf16Rows<'a> {
    bytes: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Bf16Rows<'a> {
    /// A view of `rows * cols * 2` bytes.
    ///
    /// # Errors
    /// When the number of bytes is another.
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, ShapeError> {
        exact("a bf16 matrix", bytes, sized(rows, cols, 2)?, (rows, cols))?;
        Ok(Self { bytes, rows, cols })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.cols * 2..][..self.cols * 2]
    }
}

/// Bytes of a [`Bf16Tiled`] of this shape.
///
/// # Errors
/// When they cannot be addressed.
pub fn tiled_bytes(rows: usize, cols: usize) -> Result<usize, ShapeError> {
    sized(rows.div_ceil(TILE_ROWS), cols, TILE_ROWS * 2)
}

/// A bf16 matrix in tiles of 16 rows: `[tile][column][16 rows]`, little endian; the rows that the last
/// tile has too many are +0.
#[derive(Clone, Copy)]
pub struct Bf16Tiled<'a> {
    bytes: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Bf16Tiled<'a> {
    /// A view of [`tiled_bytes`] bytes.
    ///
    /// # Errors
    /// When the number of bytes is another.
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, ShapeError> {
        exact("a tiled bf16 matrix", bytes, tiled_bytes(rows, cols)?, (rows, cols))?;
        Ok(Self { bytes, rows, cols })
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

    /// The columns of one tile, each the 16 weights of its rows.
    ///
    /// # Panics
    /// When there is no such tile.
    #[must_use]
    pub fn tile(&self, tile: usize) -> &'a [[u8; COLUMN_BYTES]] {
        &self.bytes.as_chunks().0[tile * self.cols..][..self.cols]
    }
}

/// An f32 matrix as released: row-major, little endian.
#[derive(Clone, Copy)]
pub struct F32Rows<'a> {
    bytes: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> F32Rows<'a> {
    /// A view of `rows * cols * 4` bytes.
    ///
    /// # Errors
    /// When the number of bytes is another.
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, ShapeError> {
        exact("an f32 matrix", bytes, sized(rows, cols, 4)?, (rows, cols))?;
        Ok(Self { bytes, rows, cols })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.cols * 4..][..self.cols * 4]
    }
}

/// An MXFP4 matrix as released. `packed`: [rows, cols/2], the low four bits are the even column;
/// `scales`: [rows, cols/32], a byte s means 2^(s-127), 255 is not a number.
#[derive(Clone, Copy)]
pub struct Mxfp4<'a> {
    packed: &'a [u8],
    scales: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Mxfp4<'a> {
    /// A view of `rows * cols / 2` bytes of codes and `rows * cols / 32` scale bytes.
    ///
    /// # Errors
    /// When `cols` is not a multiple of 32 or a number of bytes is another.
    pub fn new(packed: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Result<Self, ShapeError> {
        if !cols.is_multiple_of(GROUP_COLS) {
            return Err(ShapeError::Group { cols });
        }
        exact("an MXFP4 matrix", packed, sized(rows, cols / 2, 1)?, (rows, cols))?;
        exact("the scales of an MXFP4 matrix", scales, sized(rows, cols / GROUP_COLS, 1)?, (rows, cols))?;
        Ok(Self { packed, scales, rows, cols })
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of 32 columns in a row.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.cols / GROUP_COLS
    }

    /// All codes and all scale bytes.
    pub(crate) fn parts(&self) -> (&'a [u8], &'a [u8]) {
        (self.packed, self.scales)
    }

    /// The codes of one row, two to a byte.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn packed_row(&self, row: usize) -> &'a [u8] {
        &self.packed[row * (self.cols / 2)..][..self.cols / 2]
    }

    /// The scale bytes of one row.
    ///
    /// # Panics
    /// When there is no such row.
    #[must_use]
    pub fn scale_row(&self, row: usize) -> &'a [u8] {
        &self.scales[row * self.groups()..][..self.groups()]
    }
}

debug_as_shape!(Bf16Rows, Bf16Tiled, F32Rows, Mxfp4);

/// A dense matrix in any of the stored forms. The product of a matrix has the same bits in all bf16
/// forms.
#[derive(Clone, Copy, Debug)]
pub enum Matrix<'a> {
    /// bf16 as released.
    Bf16Rows(Bf16Rows<'a>),
    /// bf16 in tiles of 16 rows.
    Bf16Tiled(Bf16Tiled<'a>),
    /// bf16 in the lossless "hn" code.
    Hn(HnTiled<'a>),
    /// f32 as released.
    F32Rows(F32Rows<'a>),
}

impl Matrix<'_> {
    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::Bf16Rows(w) => w.rows(),
            Self::Bf16Tiled(w) => w.rows(),
            Self::Hn(w) => w.rows(),
            Self::F32Rows(w) => w.rows(),
        }
    }

    /// Columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        match self {
            Self::Bf16Rows(w) => w.cols(),
            Self::Bf16Tiled(w) => w.cols(),
            Self::Hn(w) => w.cols(),
            Self::F32Rows(w) => w.cols(),
        }
    }
}

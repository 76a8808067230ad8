//! Arrays cut into disjoint parts, which threads may change at the same time.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

/// Something that falls into disjoint parts which threads may change at the same time.
pub trait Cut: Sync {
    /// A part. It may outlive the cut, as long as what was cut stays borrowed.
    type Part;

    /// Number of parts.
    fn count(&self) -> usize;

    /// Part `i < count()`.
    ///
    /// # Safety
    /// Called at most once for each `i`.
    unsafe fn part(&self, i: usize) -> Self::Part;
}

/// A [rows, stride] array cut into rectangles of `tile_rows` x `tile_cols`, numbered row by row; those at
/// the edges may be smaller.
pub struct Tiles<'a, T = f32> {
    data: *mut T,
    stride: usize,
    rows: usize,
    cols: Range<usize>,
    tile_rows: usize,
    tile_cols: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: `part` is unsafe and hands out disjoint rectangles of one exclusive borrow.
unsafe impl<T: Send> Sync for Tiles<'_, T> {}

/// A rectangle of a [`Tiles`].
pub struct Tile<'p, T = f32> {
    data: *mut T,
    stride: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    _data: PhantomData<&'p mut [T]>,
}

impl<'a, T> Tiles<'a, T> {
    /// Cuts the columns `cols` of `data` = [rows, stride].
    ///
    /// # Panics
    /// When the array is too short, `cols` reaches past the stride or a tile is empty.
    pub fn new(
        data: &'a mut [T],
        stride: usize,
        cols: Range<usize>,
        tile_rows: usize,
        tile_cols: usize,
    ) -> Self {
        assert!(tile_rows > 0 && tile_cols > 0 && stride > 0, "empty tile");
        assert!(cols.start <= cols.end && cols.end <= stride, "columns {cols:?} of stride {stride}");
        let rows = data.len() / stride;
        Self { data: data.as_mut_ptr(), stride, rows, cols, tile_rows, tile_cols, _data: PhantomData }
    }

    /// One part for each run of `len` elements.
    pub fn chunks(data: &'a mut [T], len: usize) -> Self {
        Self::new(data, len, 0..len, 1, len)
    }

    /// One part for each run of `len` columns, all rows of [rows, stride] together.
    pub fn strips(data: &'a mut [T], stride: usize, len: usize) -> Self {
        let rows = (data.len() / stride.max(1)).max(1);
        Self::new(data, stride, 0..stride, rows, len)
    }

    fn across(&self) -> usize {
        self.cols.len().div_ceil(self.tile_cols)
    }
}

impl<'a, T: Send> Cut for Tiles<'a, T> {
    type Part = Tile<'a, T>;

    fn count(&self) -> usize {
        self.rows.div_ceil(self.tile_rows) * self.across()
    }

    unsafe fn part(&self, i: usize) -> Tile<'a, T> {
        assert!(i < self.count(), "part {i} of {}", self.count());
        let (down, across) = (i / self.across(), i % self.across());
        let rows = down * self.tile_rows..((down + 1) * self.tile_rows).min(self.rows);
        let first = self.cols.start + across * self.tile_cols;
        let cols = first..(first + self.tile_cols).min(self.cols.end);
        Tile { data: self.data, stride: self.stride, rows, cols, _data: PhantomData }
    }
}

impl<T> Tile<'_, T> {
    /// Rows of the whole array that the rectangle covers.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Columns of the whole array that the rectangle covers.
    #[must_use]
    pub fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// The rectangle's part of row `row`, counted in the whole array.
    ///
    /// # Panics
    /// When the row is not in the rectangle.
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(self.rows.contains(&row), "row {row} of tile {:?}", self.rows);
        // SAFETY: the row is inside the array that `Tiles::new` measured, the columns are inside the
        // stride, and the rectangle is this tile's alone for its lifetime.
        unsafe {
            let first = self.data.add(row * self.stride + self.cols.start);
            std::slice::from_raw_parts_mut(first, self.cols.len())
        }
    }
}

macro_rules! cut_tuple {
    ($($name:ident . $field:tt),+) => {
        /// Parts with the same number belong together; all members have the same count.
        impl<$($name: Cut),+> Cut for ($($name,)+) {
            type Part = ($($name::Part,)+);

            fn count(&self) -> usize {
                let count = self.0.count();
                $(assert_eq!(self.$field.count(), count, "arrays cut into different numbers of parts");)+
                count
            }

            unsafe fn part(&self, i: usize) -> Self::Part {
                // SAFETY: the caller's promise holds for every member.
                ($(unsafe { self.$field.part(i) },)+)
            }
        }
    };
}
cut_tuple!(A.0, B.1);
cut_tuple!(A.0, B.1, C.2);

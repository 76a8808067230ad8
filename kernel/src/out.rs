//! Where products read their vectors from and put their results: token-major, with a stride.
//!
//! [`Out`] holds a raw pointer so that threads can each hold the part of their own rows: parts of
//! different rows interleave in memory, which no slice can say.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ops::Range;

/// Input vectors: column t is `data[t * stride..][..len]`.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The values.
    pub data: &'a [f32],
    /// Distance from one column to the next, in values.
    pub stride: usize,
    /// How many columns.
    pub count: usize,
    /// Values of a column.
    pub len: usize,
}

impl<'a> Columns<'a> {
    /// A single column.
    #[must_use]
    pub fn one(data: &'a [f32]) -> Self {
        Self { data, stride: data.len(), count: 1, len: data.len() }
    }

    /// Columns that lie one after the other.
    #[must_use]
    pub fn packed(data: &'a [f32], len: usize, count: usize) -> Self {
        Self { data, stride: len, count, len }
    }

    /// Column t.
    ///
    /// # Panics
    /// When there is no such column.
    #[must_use]
    pub fn column(&self, t: usize) -> &'a [f32] {
        assert!(t < self.count, "column {t} of {}", self.count);
        &self.data[t * self.stride..][..self.len]
    }
}

/// Output vectors, [count, rows]: row r of column t is `data[t * stride + r]`.
#[derive(Debug)]
pub struct Out<'a> {
    data: *mut f32,
    stride: usize,
    rows: usize,
    count: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: an `Out` is an exclusive borrow of the rows it covers, like `&mut [f32]`, which is `Send`.
unsafe impl Send for Out<'_> {}
// SAFETY: through `&Out` only `part` reaches the values, and its caller proves that parts are disjoint.
unsafe impl Sync for Out<'_> {}

impl<'a> Out<'a> {
    /// The rows `0..rows` of `count` columns that lie `stride` values apart.
    ///
    /// # Panics
    /// When columns overlap (`stride < rows` with more than one of them) or do not fit in `data`.
    #[must_use]
    pub fn new(data: &'a mut [f32], stride: usize, rows: usize, count: usize) -> Self {
        assert!(count <= 1 || stride >= rows, "columns of {rows} rows overlap at a stride of {stride}");
        let needed = match count {
            0 => Some(0),
            n => (n - 1).checked_mul(stride).and_then(|start| start.checked_add(rows)),
        };
        assert!(
            needed.is_some_and(|needed| needed <= data.len()),
            "{count} columns of {rows} rows at a stride of {stride} do not fit in {} values",
            data.len()
        );
        Self { data: data.as_mut_ptr(), stride, rows, count, borrow: PhantomData }
    }

    /// A single column.
    #[must_use]
    pub fn one(data: &'a mut [f32]) -> Self {
        let rows = data.len();
        Self::new(data, rows, rows, 1)
    }

    /// Rows of this part.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The rows before `row`, and the rest.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn split_at(self, row: usize) -> (Self, Self) {
        assert!(row <= self.rows, "split at row {row} of {}", self.rows);
        let rest = Self { data: self.data.wrapping_add(row), rows: self.rows - row, ..self };
        (Self { rows: row, ..self }, rest)
    }

    /// The same rows, borrowed for a while.
    #[must_use]
    pub fn reborrow(&mut self) -> Out<'_> {
        Out { borrow: PhantomData, ..*self }
    }

    /// Some of the rows, for one of several threads.
    ///
    /// # Safety
    /// No two parts that live at the same time have a row in common.
    ///
    /// # Panics
    /// When the range is not within the rows.
    #[must_use]
    pub unsafe fn part(&self, rows: Range<usize>) -> Out<'_> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let data = self.data.wrapping_add(rows.start);
        Out { data, stride: self.stride, rows: rows.len(), count: self.count, borrow: PhantomData }
    }

    /// The rows of this part for column t.
    ///
    /// # Panics
    /// When there is no such column.
    #[must_use]
    pub fn column(&mut self, t: usize) -> &mut [f32] {
        assert!(t < self.count, "column {t} of {}", self.count);
        // SAFETY: `new` checked that `rows` values from `t * stride` on lie in the borrowed slice for
        // every t below `count`, and columns do not overlap; `split_at` and `part` only narrow the rows
        // and are disjoint; `&mut self` excludes another borrow of the same part.
        unsafe { core::slice::from_raw_parts_mut(self.data.wrapping_add(t * self.stride), self.rows) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_write_where_they_should() {
        let mut data = [0.0f32; 14];
        let out = Out::new(&mut data, 5, 4, 3);
        let (mut a, mut b) = out.split_at(1);
        for t in 0..3 {
            a.column(t).fill(1.0 + t as f32);
            b.column(t).fill(10.0 + t as f32);
        }
        assert_eq!((a.rows(), b.rows(), b.count()), (1, 3, 3));
        assert_eq!(data, [1., 10., 10., 10., 0., 2., 11., 11., 11., 0., 3., 12., 12., 12.]);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn too_short_a_slice_is_refused() {
        let _ = Out::new(&mut [0.0; 13], 5, 4, 3);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_columns_are_refused() {
        let _ = Out::new(&mut [0.0; 13], 3, 4, 3);
    }
}

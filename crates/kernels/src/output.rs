//! Where matrix products go: column ranges of one output plane, written by several threads at once.
//!
//! A product of T tokens and N weight rows is a `[T, N]` plane, row-major. Threads split the *weight rows*,
//! that is the plane's columns, which no `&mut [f32]` can express. A [`Shard`] is the exclusive right to
//! such a range of columns for all tokens; shards are split from one another and never overlap.

use std::marker::PhantomData;
use std::ops::Range;

/// Exclusive access to the columns `rows()` (weight rows) of a `[T, N]` row-major output plane.
#[derive(Debug)]
pub struct Shard<'a> {
    /// Column 0 of this shard for token 0. With `tokens == 0` or no columns it is never read through.
    base: *mut f32,
    tokens: usize,
    /// N of the plane: distance of two tokens.
    stride: usize,
    /// The name of this shard's first column, and of the one past its last.
    rows: Range<usize>,
    plane: PhantomData<&'a mut [f32]>,
}

// SAFETY: a shard is an exclusive borrow of its elements, as `&mut [f32]` is, and f32 is Send.
unsafe impl Send for Shard<'_> {}
// SAFETY: nothing can be read or written through `&Shard` but by the promise of `alias`.
unsafe impl Sync for Shard<'_> {}

impl<'a> Shard<'a> {
    /// The whole plane: `out` is `[tokens, n]`, row-major; its columns are the rows `0..n`.
    ///
    /// # Panics
    /// If `out` has another length.
    #[must_use]
    pub fn new(out: &'a mut [f32], tokens: usize, n: usize) -> Self {
        assert_eq!(Some(out.len()), tokens.checked_mul(n), "output is [{tokens}, {n}]");
        Self { base: out.as_mut_ptr(), tokens, stride: n, rows: 0..n, plane: PhantomData }
    }

    /// Tokens of the plane.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The weight rows that may be written.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The rows before `row`, and the rest.
    ///
    /// # Panics
    /// If `row` lies outside of `rows()` (its end is allowed).
    #[must_use]
    pub fn split_at(self, row: usize) -> (Self, Self) {
        assert!(self.rows.start <= row && row <= self.rows.end, "row {row} of {:?}", self.rows);
        let right = Self {
            base: self.base.wrapping_add(row - self.rows.start),
            tokens: self.tokens,
            stride: self.stride,
            rows: row..self.rows.end,
            plane: PhantomData,
        };
        (Self { rows: self.rows.start..row, ..self }, right)
    }

    /// A part of this shard, for as long as this one is borrowed; row names stay.
    ///
    /// # Panics
    /// If `rows` is not within `rows()`.
    pub fn part(&mut self, rows: Range<usize>) -> Shard<'_> {
        // SAFETY: the result borrows this shard mutably, so it is the only one.
        unsafe { self.alias(rows) }
    }

    /// A part of this shard beside others of it.
    ///
    /// # Safety
    /// No two parts that overlap are alive at the same time, and this shard is not written meanwhile.
    ///
    /// # Panics
    /// If `rows` is not within `rows()`.
    pub(crate) unsafe fn alias(&self, rows: Range<usize>) -> Shard<'a> {
        assert!(
            self.rows.start <= rows.start && rows.start <= rows.end && rows.end <= self.rows.end,
            "rows {rows:?} of {:?}",
            self.rows
        );
        Shard {
            base: self.base.wrapping_add(rows.start - self.rows.start),
            tokens: self.tokens,
            stride: self.stride,
            rows,
            plane: PhantomData,
        }
    }

    /// The same columns under other names: `first` for the first one and so on.
    #[must_use]
    pub fn renumbered(self, first: usize) -> Self {
        let rows = first..first + self.rows.len();
        Self { rows, ..self }
    }

    /// Writes `values` to the rows `row..row + values.len()` of `token`.
    ///
    /// # Panics
    /// If token or rows are not of this shard.
    #[inline]
    pub fn store(&mut self, token: usize, row: usize, values: &[f32]) {
        self.slice(token, row, values.len()).copy_from_slice(values);
    }

    /// Writes a whole block of rows of `token`.
    ///
    /// # Panics
    /// As [`Self::store`].
    #[inline]
    pub fn store_block<const N: usize>(&mut self, token: usize, row: usize, values: &[f32; N]) {
        if let Some(block) = self.slice(token, row, N).as_mut_array() {
            *block = *values;
        }
    }

    /// Writes one value.
    ///
    /// # Panics
    /// If token or row are not of this shard.
    #[inline]
    pub fn set(&mut self, token: usize, row: usize, value: f32) {
        self.slice(token, row, 1)[0] = value;
    }

    /// All of this shard's rows of `token`.
    ///
    /// # Panics
    /// If there is no such token.
    #[inline]
    pub fn token(&mut self, token: usize) -> &mut [f32] {
        self.slice(token, self.rows.start, self.rows.len())
    }

    #[inline]
    fn slice(&mut self, token: usize, row: usize, len: usize) -> &mut [f32] {
        assert!(
            token < self.tokens
                && row >= self.rows.start
                && row <= self.rows.end
                && len <= self.rows.end - row,
            "token {token}, rows {row}+{len} of {} tokens, rows {:?}",
            self.tokens,
            self.rows
        );
        let at = token * self.stride + (row - self.rows.start);
        // SAFETY: token and columns lie within the plane that `base` points into (asserted); this shard has
        // them to itself for 'a, and the result borrows the shard.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

/// A plane of f32 whose parts are handed to threads by index: `&mut` split up by promise, not by type.
///
/// For drivers that give task i a part that only task i touches; kernels never see it.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a, T> {
    base: *mut T,
    len: usize,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are handed out by unsafe functions only, whose callers promise that they are disjoint; then
// this is a set of `&mut [T]` sent to other threads.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above; `&Shared` gives nothing that `Shared` does not.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { base: data.as_mut_ptr(), len: data.len(), data: PhantomData }
    }

    /// Elements `range`.
    ///
    /// # Safety
    /// No other part that is alive at the same time overlaps it.
    ///
    /// # Panics
    /// If it is out of bounds.
    #[allow(clippy::mut_from_ref, reason = "the caller of this unsafe function promises exclusiveness")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds (asserted) of a slice borrowed for 'a; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }
}

impl<'a> Shared<'a, f32> {
    /// The columns `rows` of the `[tokens, n]` plane that begins at element `start`.
    ///
    /// # Safety
    /// No other part or shard that is alive at the same time overlaps it.
    ///
    /// # Panics
    /// If it is out of bounds.
    pub(crate) unsafe fn shard(
        &self,
        start: usize,
        tokens: usize,
        n: usize,
        rows: Range<usize>,
    ) -> Shard<'a> {
        assert!(rows.start <= rows.end && rows.end <= n && start + tokens * n <= self.len);
        Shard {
            base: self.base.wrapping_add(start + rows.start),
            tokens,
            stride: n,
            rows,
            plane: PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_write_their_own_columns_and_no_others() {
        let mut plane = vec![0.0f32; 3 * 10];
        let (mut left, right) = Shard::new(&mut plane, 3, 10).split_at(4);
        let (mut middle, mut right) = right.split_at(7);
        std::thread::scope(|s| {
            s.spawn(|| (0..3).for_each(|t| left.store(t, 0, &[1.0; 4])));
            s.spawn(|| (0..3).for_each(|t| middle.token(t).fill(2.0)));
            s.spawn(|| (0..3).for_each(|t| (7..10).for_each(|r| right.set(t, r, 3.0))));
        });
        for row in plane.chunks(10) {
            assert_eq!(row, [1., 1., 1., 1., 2., 2., 2., 3., 3., 3.]);
        }
    }

    #[test]
    fn parts_keep_names_and_renumbering_changes_them() {
        let mut plane = vec![0.0f32; 2 * 6];
        let mut whole = Shard::new(&mut plane, 2, 6);
        whole.part(2..4).store(1, 2, &[5.0, 6.0]);
        whole.part(4..6).renumbered(0).set(0, 1, 7.0);
        assert_eq!(plane, [0., 0., 0., 0., 0., 7., 0., 0., 5., 6., 0., 0.]);
    }

    #[test]
    fn out_of_range_rows_and_tokens_panic() {
        for (token, row, len) in [(2, 0, 1), (0, 3, 1), (0, 2, 2), (0, 9, 0)] {
            let result = std::panic::catch_unwind(|| {
                let mut plane = vec![0.0f32; 8];
                let (mut shard, _) = Shard::new(&mut plane, 2, 4).split_at(3);
                shard.store(token, row, &vec![0.0; len]);
            });
            assert!(result.is_err(), "{token} {row} {len}");
        }
    }
}

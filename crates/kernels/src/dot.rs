//! The sum of products that every float kernel is made of, and its blocks over several rows and vectors.
//!
//! Element i goes to lane i mod 16 by one fused multiply-add, i ascending, lanes starting at +0; the lanes
//! are joined by [`join`]. Lanes past the end of a short vector are left alone: the fast way pads the rows
//! with +0 and the vectors with -0, whose product -0 changes no lane, not even one that holds -0.
//!
//! A NaN comes out as a NaN, but which one is not defined, here and in all of this crate.

// Tiles of registers are indexed: iterators over several of them at once are hard to read.
#![allow(clippy::needless_range_loop)]

use smoe_format::half::{bf16_to_f32, f16_to_f32};

use crate::isa::Kernels;
use crate::simd::{LANES, Op, Simd, join};

/// How the elements of a row are stored.
pub(crate) trait Element {
    const BYTES: usize;

    /// The value of one element, which is `BYTES` long.
    fn value(bytes: &[u8]) -> f32;

    /// Sixteen values.
    ///
    /// # Safety
    /// `16 * BYTES` bytes at `at` can be read; any alignment.
    unsafe fn load<S: Simd>(s: S, at: *const u8) -> S::F;
}

/// Defines element types: name, bytes, value of one, load of sixteen.
macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident, $bytes:expr, $value:expr, $load:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name;

        impl Element for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn value(bytes: &[u8]) -> f32 {
                // A slice of another length is zero bytes; rows are cut into pieces of this length.
                $value(bytes.try_into().unwrap_or([0; $bytes]))
            }

            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, at: *const u8) -> S::F {
                // SAFETY: the caller's promise is the callee's.
                unsafe { s.$load(at) }
            }
        }
    )*};
}

elements! {
    /// Little-endian f32.
    F32, 4, f32::from_le_bytes, load_f32;
    /// Little-endian IEEE halves.
    F16, 2, |b| f16_to_f32(u16::from_le_bytes(b)), load_f16;
    /// Little-endian bfloat16.
    Bf16, 2, |b| bf16_to_f32(u16::from_le_bytes(b)), load_bf16;
    /// Signed bytes.
    I8, 1, |b| f32::from(i8::from_le_bytes(b)), load_i8;
}

/// The definition of a sum of products.
pub(crate) fn sum_of_products(pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, (a, b)) in pairs.enumerate() {
        lanes[i % LANES] = a.mul_add(b, lanes[i % LANES]);
    }
    join(lanes)
}

/// Rows of one element type at equal distances, all of which were seen to lie within `bytes`.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    count: usize,
}

impl<'a> Rows<'a> {
    /// `count` rows of `row_bytes` bytes each; `bytes` may end with the last row's last element.
    pub(crate) fn new(bytes: &'a [u8], row_bytes: usize, count: usize) -> Self {
        Self { bytes, row_bytes, count }
    }

    pub(crate) fn count(self) -> usize {
        self.count
    }

    /// The first `elements` elements of row `row`.
    #[inline(always)]
    pub(crate) fn row<E: Element>(self, row: usize, elements: usize) -> &'a [u8] {
        let start = row * self.row_bytes;
        &self.bytes[start..start + elements * E::BYTES]
    }
}

/// The definition of products of rows with vectors: `emit(row, vector, sum)` for all of them.
pub(crate) fn products_scalar<E: Element>(
    rows: Rows<'_>,
    vectors: &[f32],
    n: usize,
    mut emit: impl FnMut(usize, usize, f32),
) {
    for row in 0..rows.count() {
        for (v, vector) in vectors.chunks_exact(n.max(1)).enumerate() {
            let values = rows.row::<E>(row, n).chunks_exact(E::BYTES).map(E::value);
            emit(row, v, sum_of_products(values.zip(vector.iter().copied())));
        }
    }
}

/// Vectors that are multiplied with all rows before the next ones are looked at: what stays in a cache of
/// the second level, so that a long prompt does not stream its activations once per four rows.
const PANEL_BYTES: usize = 512 << 10;

/// [`products_scalar`] in blocks: `vectors` is `[count, n]`.
#[inline(always)]
pub(crate) fn products<S: Simd, E: Element>(
    s: S,
    rows: Rows<'_>,
    vectors: &[f32],
    n: usize,
    emit: &mut impl FnMut(usize, usize, f32),
) {
    if n == 0 {
        return;
    }
    let panel = (PANEL_BYTES / (4 * n)).max(4) / 4 * 4;
    for (p, vectors) in vectors.chunks(panel * n).enumerate() {
        let emit = &mut |row: usize, v: usize, sum: f32| emit(row, p * panel + v, sum);
        let mut row = 0;
        while row + 4 <= rows.count() {
            if S::WIDE {
                against_vectors::<S, E, 4, 4>(s, rows, row, vectors, n, emit);
            } else if vectors.len() == n {
                against_vectors::<S, E, 4, 1>(s, rows, row, vectors, n, emit);
            } else {
                against_vectors::<S, E, 2, 2>(s, rows, row, vectors, n, emit);
                against_vectors::<S, E, 2, 2>(s, rows, row + 2, vectors, n, emit);
            }
            row += 4;
        }
        while row < rows.count() {
            against_vectors::<S, E, 1, 4>(s, rows, row, vectors, n, emit);
            row += 1;
        }
    }
}

/// `R` rows from `row` with all `vectors`, `V` at a time and the rest by two and one.
#[inline(always)]
fn against_vectors<S: Simd, E: Element, const R: usize, const V: usize>(
    s: S,
    rows: Rows<'_>,
    row: usize,
    vectors: &[f32],
    n: usize,
    emit: &mut impl FnMut(usize, usize, f32),
) {
    let count = vectors.len() / n;
    let mut v = 0;
    while v + V <= count {
        block::<S, E, R, V>(s, rows, row, vectors, v, n, emit);
        v += V;
    }
    if V > 2 && v + 2 <= count {
        block::<S, E, R, 2>(s, rows, row, vectors, v, n, emit);
        v += 2;
    }
    while v < count {
        block::<S, E, R, 1>(s, rows, row, vectors, v, n, emit);
        v += 1;
    }
}

/// `R` rows from `row` with `V` vectors from `first`.
#[inline(always)]
fn block<S: Simd, E: Element, const R: usize, const V: usize>(
    s: S,
    rows: Rows<'_>,
    row: usize,
    vectors: &[f32],
    first: usize,
    n: usize,
    emit: &mut impl FnMut(usize, usize, f32),
) {
    let mut row_of = [&[][..]; R];
    for (r, slice) in row_of.iter_mut().enumerate() {
        *slice = rows.row::<E>(row + r, n);
    }
    let mut vector_of = [&[][..]; V];
    for (v, slice) in vector_of.iter_mut().enumerate() {
        *slice = &vectors[(first + v) * n..(first + v + 1) * n];
    }
    // Two ways on purpose: with the tail's calls in its way the sums would leave their registers.
    let acc = whole_lanes::<S, E, R, V>(s, row_of, vector_of, rows.row_bytes);
    if n.is_multiple_of(LANES) {
        emit_sums(s, acc, row, first, emit);
    } else {
        let acc = add_tail::<S, E, R, V>(s, row_of, vector_of, acc);
        emit_sums(s, acc, row, first, emit);
    }
}

/// The lanes of all products up to the last whole sixteen elements; rows and vectors have one length.
#[inline(always)]
fn whole_lanes<S: Simd, E: Element, const R: usize, const V: usize>(
    s: S,
    rows: [&[u8]; R],
    vectors: [&[f32]; V],
    row_bytes: usize,
) -> [[S::F; V]; R] {
    let n = vectors[0].len();
    assert!(rows.iter().all(|row| row.len() == n * E::BYTES) && vectors.iter().all(|v| v.len() == n));
    let whole = n / LANES * LANES;
    let mut acc = [[s.splat(0.0); V]; R];
    let mut i = 0;
    while i < whole {
        let mut w = [s.splat(0.0); R];
        for r in 0..R {
            // SAFETY: `rows[r]` holds `n` elements and `i + 16 <= whole <= n`.
            w[r] = unsafe { E::load(s, rows[r].as_ptr().add(i * E::BYTES)) };
            // The next rows of this column: at one vector memory is all that counts, and the processor's
            // own prefetch ends with each page.
            s.prefetch(rows[r].as_ptr().wrapping_add(i * E::BYTES + R * row_bytes));
        }
        for v in 0..V {
            // SAFETY: `vectors[v]` holds `n` f32 and `i + 16 <= whole <= n`.
            let x = unsafe { s.load_f32(vectors[v].as_ptr().add(i).cast()) };
            for r in 0..R {
                acc[r][v] = s.fma(w[r], x, acc[r][v]);
            }
        }
        i += LANES;
    }
    acc
}

/// Adds the elements past the last whole sixteen.
#[inline(always)]
fn add_tail<S: Simd, E: Element, const R: usize, const V: usize>(
    s: S,
    rows: [&[u8]; R],
    vectors: [&[f32]; V],
    mut acc: [[S::F; V]; R],
) -> [[S::F; V]; R] {
    let whole = vectors[0].len() / LANES * LANES;
    for r in 0..R {
        let mut tail = [0.0f32; LANES];
        let bytes = rows[r][whole * E::BYTES..].chunks_exact(E::BYTES);
        for (value, bytes) in tail.iter_mut().zip(bytes) {
            *value = E::value(bytes);
        }
        let w = s.load(&tail);
        for v in 0..V {
            let x = s.load_part(&vectors[v][whole..], -0.0);
            acc[r][v] = s.fma(w, x, acc[r][v]);
        }
    }
    acc
}

/// Joins the lanes, four sums at once where there are four.
#[inline(always)]
fn emit_sums<S: Simd, const R: usize, const V: usize>(
    s: S,
    acc: [[S::F; V]; R],
    row: usize,
    first: usize,
    emit: &mut impl FnMut(usize, usize, f32),
) {
    if V.is_multiple_of(4) {
        for r in 0..R {
            for v in (0..V).step_by(4) {
                let sums = s.sum_each([acc[r][v], acc[r][v + 1], acc[r][v + 2], acc[r][v + 3]]);
                for i in 0..4 {
                    emit(row + r, first + v + i, sums[i]);
                }
            }
        }
    } else if R.is_multiple_of(4) {
        for v in 0..V {
            for r in (0..R).step_by(4) {
                let sums = s.sum_each([acc[r][v], acc[r + 1][v], acc[r + 2][v], acc[r + 3][v]]);
                for i in 0..4 {
                    emit(row + r + i, first + v, sums[i]);
                }
            }
        }
    } else {
        for r in 0..R {
            for v in 0..V {
                emit(row + r, first + v, s.sum(acc[r][v]));
            }
        }
    }
}

/// f32 as the bytes they are in memory.
fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: any f32 is four initialised bytes, which need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Op for Dot<'_> {
    type Out = f32;

    fn scalar(self) -> f32 {
        sum_of_products(self.a.iter().copied().zip(self.b.iter().copied()))
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f32 {
        dot_lanes(s, self.a, self.b)
    }
}

/// The dot product of two vectors of one length.
#[inline(always)]
pub(crate) fn dot_lanes<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    // `F32` elements are little-endian; so are numbers in memory wherever there are lanes.
    const { assert!(cfg!(target_endian = "little")) };
    let mut result = 0.0;
    let row = Rows::new(bytes_of(a), 0, 1);
    block::<S, F32, 1, 1>(s, row, 0, b, 0, a.len(), &mut |_, _, sum| result = sum);
    result
}

impl Kernels {
    /// The dot product of `a` and `b`; +0 if they are empty.
    ///
    /// Element i is added to lane i mod 16 by one fused multiply-add, i ascending, lanes starting at +0; the
    /// sixteen lanes are joined by adding halves until one value is left.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "operands of a dot product");
        self.run(Dot { a, b })
    }
}

//! A weight matrix where the disk put it: bytes, shape, encoding.

use std::ops::Range;

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform};

/// A borrowed weight matrix of `rows x cols`: `y = W x` has `rows` outputs for `cols` inputs.
///
/// The bytes are those of the vault (`smoe_format::encoding`). They are 64-byte aligned in practice, and
/// nothing but speed depends on it.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    rows: usize,
    cols: usize,
    encoding: Encoding,
}

impl<'a> Matrix<'a> {
    /// A matrix over `bytes`.
    ///
    /// # Panics
    /// If `bytes` is not exactly as long as that shape and encoding need.
    #[must_use]
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize, encoding: Encoding) -> Self {
        assert_eq!(
            Some(bytes.len()),
            encoding.tensor_bytes(rows, cols),
            "bytes of a {rows} x {cols} {encoding} matrix"
        );
        Self { bytes, rows, cols, encoding }
    }

    /// Outputs.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// What the bytes mean.
    #[must_use]
    pub const fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The weights.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The weights from the block of rows on that begins at `row`; none if there is no such block.
    pub(crate) fn rows_from(&self, row: usize) -> &'a [u8] {
        let before = self.encoding.tensor_bytes(row, self.cols).unwrap_or(usize::MAX);
        self.bytes.get(before..).unwrap_or_default()
    }

    /// The uniform codes in whose tiles the codes lie ([`Encoding::tiles`]); `None` for float weights.
    #[must_use]
    pub const fn tiles(&self) -> Option<Uniform> {
        self.encoding.tiles()
    }

    /// The levels that the codes name, if they are of a table.
    #[must_use]
    pub(crate) const fn levels(&self) -> Option<[i8; 16]> {
        match self.encoding {
            Encoding::Table(table) => Some(*table.register()),
            _ => None,
        }
    }

    /// Asserts that `rows` are whole blocks of 32 of this matrix, its end excepted.
    pub(crate) fn assert_range(&self, rows: &Range<usize>) {
        let aligned = |row: usize| row.is_multiple_of(ROWS) || row == self.rows;
        assert!(
            rows.start <= rows.end && rows.end <= self.rows && aligned(rows.start) && aligned(rows.end),
            "rows {rows:?} of {} are not whole blocks of {ROWS}",
            self.rows
        );
    }
}

impl std::fmt::Debug for Matrix<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matrix({} x {} {})", self.rows, self.cols, self.encoding)
    }
}

//! AWQ: four-bit codes, eight rows to a word.

use std::collections::HashMap;
use std::ops::Range;

use smoe_format::{Encoding, Uniform};

use super::{FLOATS, INTS, Raw, float, matrix, part, regroup, regrouped, stored};
use crate::error::SculptError;
use crate::source::{At, Codes, Files, Form, Source, Stored, Unread};

/// The parts of an AWQ tensor, each with the matrix' rows along its columns, eight to a word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awq {
    codes: At,
    zeros: At,
    scales: At,
    ty: Encoding,
    group: usize,
    height: usize,
    width: usize,
}

/// Which nibble of a word has the row of this number.
const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

pub(super) fn awq(module: &str, tensor: &Raw, raw: &HashMap<String, Raw>, group: usize) -> Stored {
    let form = || {
        if !INTS.contains(&tensor.dtype) {
            return Err(Unread::Packed(format!("`{module}.qweight` is {:?} instead of I32", tensor.dtype)));
        }
        let [width, words] = matrix(tensor)?;
        if regrouped(4, group).is_none() || !width.is_multiple_of(group) {
            return Err(Unread::Packed(format!("{width} columns are no whole groups of {group}")));
        }
        let (groups, height) = (width / group, words * 8);
        let scales = part(raw, &format!("{module}.scales"), &[groups, height], FLOATS)?;
        let zeros = part(raw, &format!("{module}.qzeros"), &[groups, words], INTS)?;
        let (codes, ty) = (tensor.at(), float(scales));
        let form = Awq { codes, zeros: zeros.at(), scales: scales.at(), ty, group, height, width };
        Ok(([height, width], Form::Awq(form)))
    };
    stored(tensor, form())
}

impl Awq {
    /// Where its tensors are.
    pub fn places(&self) -> Vec<At> {
        vec![self.codes, self.zeros, self.scales]
    }

    pub fn uniform(&self) -> Option<Uniform> {
        regrouped(4, self.group)
    }

    /// Four-bit numbers of line `line` of a packed part for the rows.
    fn line(
        &self,
        files: Files<'_>,
        at: At,
        line: usize,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        mut put: impl FnMut(usize, u8),
    ) -> Result<(), SculptError> {
        let words = rows.start / 8..rows.end.div_ceil(8);
        raw.resize(4 * words.len(), 0);
        files.read(at.skip(4 * (line * self.height / 8 + words.start) as u64), raw)?;
        for (i, row) in rows.enumerate() {
            let word = row / 8 - words.start;
            let nibble = AWQ_NIBBLE[row % 8];
            put(i, (raw[4 * word + nibble / 2] >> (nibble % 2 * 4)) & 15);
        }
        Ok(())
    }

    pub fn codes(
        &self,
        source: &Source,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        out: &mut Codes,
    ) -> Result<(), SculptError> {
        for col in 0..self.width {
            let codes = &mut out.codes;
            self.line(files, self.codes, col, rows.clone(), raw, |i, code| {
                codes[i * self.width + col] = code
            })?;
        }
        let (n, groups) = (rows.len(), self.width / self.group);
        let mut levels = vec![[0.0; 2]; n * groups];
        let mut scales = vec![0.0; n];
        let wide = if self.ty == Encoding::F32 { 4 } else { 2 };
        for g in 0..groups {
            raw.resize(wide * n, 0);
            files.read(self.scales.skip((wide * (g * self.height + rows.start)) as u64), raw)?;
            self.ty.decode_row(raw, n, 0, &mut scales);
            self.line(files, self.zeros, g, rows.clone(), raw, |i, zero| {
                levels[i * groups + g] = [scales[i], -(scales[i] * f32::from(zero))];
            })?;
        }
        regroup(source, &levels, self.group, out);
        Ok(())
    }
}

//! GPTQ: codes packed along the columns of a word, in groups that a list may put in another order.

use std::collections::HashMap;
use std::ops::Range;

use smoe_format::{Encoding, Uniform};

use super::{FLOATS, INTS, Raw, bits_at, float, matrix, part, regroup, regrouped, stored};
use crate::error::SculptError;
use crate::source::{At, Codes, Files, Form, Source, Stored, Unread};

/// The parts of a GPTQ tensor, each with the matrix' rows along its columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gptq {
    codes: At,
    zeros: At,
    scales: At,
    ty: Encoding,
    bits: u8,
    /// Columns that share a scale.
    group: usize,
    zero_plus: u8,
    /// Which group each column is in, if that is not `column / group`.
    order: Option<At>,
    height: usize,
    width: usize,
}

pub(super) fn gptq(
    module: &str,
    tensor: &Raw,
    raw: &HashMap<String, Raw>,
    (bits, group, zero_plus): (u8, Option<usize>, u8),
) -> Stored {
    let form = || {
        if !INTS.contains(&tensor.dtype) {
            return Err(Unread::Packed(format!("`{module}.qweight` is {:?} instead of I32", tensor.dtype)));
        }
        let [words, height] = matrix(tensor)?;
        let stream = words.checked_mul(32).unwrap_or(1);
        let (width, rest) = (stream / usize::from(bits), stream % usize::from(bits));
        let group = group.unwrap_or(width);
        if rest != 0 || width == 0 || !(height * usize::from(bits)).is_multiple_of(32) {
            let shape = &tensor.shape;
            return Err(Unread::Packed(format!(
                "`{module}.qweight` of shape {shape:?} holds no {bits}-bit codes"
            )));
        }
        let groups = width.div_ceil(group);
        let scales = part(raw, &format!("{module}.scales"), &[groups, height], FLOATS)?;
        let zero_words = height * usize::from(bits) / 32;
        let zeros = part(raw, &format!("{module}.qzeros"), &[groups, zero_words], INTS)?;
        let name = format!("{module}.g_idx");
        let order = match raw.contains_key(&name) {
            true => Some(part(raw, &name, &[width], INTS)?.at()),
            false => None,
        };
        let (codes, ty) = (tensor.at(), float(scales));
        let (zeros, scales) = (zeros.at(), scales.at());
        let form = Gptq { codes, zeros, scales, ty, bits, group, zero_plus, order, height, width };
        Ok(([height, width], Form::Gptq(form)))
    };
    stored(tensor, form())
}

impl Gptq {
    pub fn uniform(&self) -> Option<Uniform> {
        if self.order.is_some() { None } else { regrouped(self.bits, self.group) }
    }

    /// Where its tensors are.
    pub fn places(&self) -> Vec<At> {
        [self.codes, self.zeros, self.scales].into_iter().chain(self.order).collect()
    }

    /// Reads which group each column is in, and forgets the list if it says nothing new.
    pub fn examine(&mut self, files: Files<'_>) -> Result<(), SculptError> {
        if self.order.is_some() {
            let groups = self.groups(files)?;
            if groups.iter().enumerate().all(|(col, &g)| g == col / self.group) {
                self.order = None;
            }
        }
        Ok(())
    }

    fn groups(&self, files: Files<'_>) -> Result<Vec<usize>, SculptError> {
        let Some(at) = self.order else {
            return Ok((0..self.width).map(|col| col / self.group).collect());
        };
        let mut bytes = vec![0; 4 * self.width];
        files.read(at, &mut bytes)?;
        let count = self.width.div_ceil(self.group);
        let groups = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b) as usize);
        groups
            .map(|g| {
                if g < count {
                    return Ok(g);
                }
                let file = files.path(at).to_owned();
                Err(SculptError::Safetensors { file, what: format!("a g_idx of {g} of {count} groups") })
            })
            .collect()
    }

    /// Codes row by row, and scale and minimum of each (row, file's group).
    fn read(
        &self,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        codes: &mut Vec<u8>,
    ) -> Result<Vec<[f32; 2]>, SculptError> {
        let (n, bits) = (rows.len(), usize::from(self.bits));
        codes.resize(n * self.width, 0);
        codes.fill(0);
        let words = self.width * bits / 32;
        raw.resize(4 * n, 0);
        for word in 0..words {
            files.read(self.codes.skip(4 * (word * self.height + rows.start) as u64), raw)?;
            // A code may lie across two words.
            let (first, last) = (word * 32 / bits, (word * 32 + 31) / bits);
            for (codes, bytes) in codes.chunks_exact_mut(self.width).zip(raw.as_chunks::<4>().0) {
                let value = u64::from(u32::from_le_bytes(*bytes));
                for (code, col) in codes[first..=last].iter_mut().zip(first..) {
                    let (begin, from) = (col * bits, word * 32);
                    let part = if begin >= from { value >> (begin - from) } else { value << (from - begin) };
                    *code |= (part & ((1 << bits) - 1)) as u8;
                }
            }
        }
        let groups = self.width.div_ceil(self.group);
        let mut levels = vec![[0.0; 2]; n * groups];
        let mut scales = vec![0.0; n];
        let wide = if self.ty == Encoding::F32 { 4 } else { 2 };
        for g in 0..groups {
            let at = self.scales.skip((wide * (g * self.height + rows.start)) as u64);
            raw.resize(wide * n, 0);
            files.read(at, raw)?;
            self.ty.decode_row(raw, n, 0, &mut scales);
            let row_bytes = self.height * bits / 8;
            raw.resize(row_bytes, 0);
            files.read(self.zeros.skip((g * row_bytes) as u64), raw)?;
            for (i, (row, &scale)) in rows.clone().zip(&scales).enumerate() {
                let zero = f32::from(bits_at(raw, row * bits, self.bits)) + f32::from(self.zero_plus);
                levels[i * groups + g] = [scale, -(scale * zero)];
            }
        }
        Ok(levels)
    }

    pub fn codes(
        &self,
        source: &Source,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        out: &mut Codes,
    ) -> Result<(), SculptError> {
        let levels = self.read(files, rows, raw, &mut out.codes)?;
        regroup(source, &levels, self.group, out);
        Ok(())
    }

    /// The weights, when columns are in groups as the list says.
    pub fn weights(
        &self,
        source: &Source,
        files: Files<'_>,
        rows: Range<usize>,
        raw: &mut Vec<u8>,
        values: &mut [f32],
    ) -> Result<(), SculptError> {
        let mut codes = Vec::new();
        let levels = self.read(files, rows, raw, &mut codes)?;
        let of_col = self.groups(files)?;
        let groups = self.width.div_ceil(self.group);
        let of_rows = values.chunks_exact_mut(source.cols).zip(codes.chunks_exact(source.cols));
        for ((values, codes), levels) in of_rows.zip(levels.chunks_exact(groups)) {
            for ((value, &code), &g) in values.iter_mut().zip(codes).zip(&of_col) {
                let [scale, minimum] = levels[g];
                *value = f32::from(code).mul_add(scale, minimum);
            }
        }
        Ok(())
    }
}

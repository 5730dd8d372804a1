//! Products with the backbone's matrices, and int8 activations for them.

use smoe_format::Encoding;
use smoe_gpu::{
    CodedMatmul, CodedPlane, Columns, FloatMatmul, GpuError, HeadMatmul, HeadPlane, Quantise, Slice, Weights,
};

use super::Bench;
use super::data::{q, tensor, uniform};

impl Bench {
    pub(super) fn quantise(&mut self) -> Result<(), GpuError> {
        for tokens in [1, 8] {
            let plane = CodedPlane::new(&self.gpu, tokens, 4096, 64)?;
            let quantise = Quantise::new(&self.gpu, &self.x(tokens, 4096)?, &plane)?;
            let seconds = self.time(&|step, _| quantise.record(step, tokens))?;
            self.tell("quantise 4096", tokens, seconds, (tokens * 4096 * 4) as u64);
        }
        Ok(())
    }

    pub(super) fn coded(
        &mut self,
        what: &str,
        (rows, cols): (usize, usize),
        encoding: Encoding,
        tokens: usize,
    ) -> Result<(), GpuError> {
        let bytes = tensor(encoding, rows, cols);
        let copies = self.copies_of(&bytes)?;
        let x = self.coded_x(tokens, cols, uniform(encoding).group())?;
        let plane = self.gpu.buffer("out", (4 * tokens * rows) as u64)?;
        let out = Columns::whole(plane, rows);
        let product = |slice: &Slice| {
            let weights = Weights::new(slice.clone(), rows, cols, encoding);
            CodedMatmul::new(&self.gpu, &weights, &x, &out)
        };
        let products = copies.iter().map(product).collect::<Result<Vec<_>, _>>()?;
        let work = (bytes.len() as u64, (tokens * rows * cols) as f64);
        self.product(what, tokens, work, &|step, i| products[i % products.len()].record(step, tokens))
    }

    pub(super) fn float(
        &mut self,
        what: &str,
        (rows, cols): (usize, usize),
        tokens: usize,
    ) -> Result<(), GpuError> {
        let bytes = tensor(Encoding::Bf16, rows, cols);
        let copies = self.copies_of(&bytes)?;
        let x = self.x(tokens, cols)?;
        let plane = self.gpu.buffer("out", (4 * tokens * rows) as u64)?;
        let out = Columns::whole(plane, rows);
        let product = |slice: &Slice| {
            let weights = Weights::new(slice.clone(), rows, cols, Encoding::Bf16);
            FloatMatmul::new(&self.gpu, &weights, &x, tokens, &out)
        };
        let products = copies.iter().map(product).collect::<Result<Vec<_>, _>>()?;
        let seconds = self.time(&|step, i| products[i % products.len()].record(step, tokens))?;
        self.tell(what, tokens, seconds, bytes.len() as u64);
        Ok(())
    }

    /// A matrix of each head.
    pub(super) fn heads(
        &mut self,
        name: &str,
        heads: usize,
        (rows, cols): (usize, usize),
        tokens: usize,
    ) -> Result<(), GpuError> {
        let bytes = tensor(q(8), heads * rows, cols);
        let copies = self.copies_of(&bytes)?;
        let plane = HeadPlane::Coded(self.coded_x(tokens * heads, cols, 64)?);
        let out = self.gpu.buffer("out", (4 * tokens * heads * rows) as u64)?;
        let product = |slice: &Slice| {
            let weights = Weights::new(slice.clone(), heads * rows, cols, q(8));
            HeadMatmul::new(&self.gpu, &weights, heads, &plane, tokens, &out, rows)
        };
        let products = copies.iter().map(product).collect::<Result<Vec<_>, _>>()?;
        let seconds = self.time(&|step, i| products[i % products.len()].record(step, tokens))?;
        self.tell(
            &format!("{name} {heads} heads of {rows} x {cols} q8"),
            tokens,
            seconds,
            bytes.len() as u64,
        );
        Ok(())
    }
}

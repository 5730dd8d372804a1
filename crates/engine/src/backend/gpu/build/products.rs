//! Norms of the hidden states and products with the backbone, as every part of a layer binds them.

use smoe_gpu::{
    Beside, CodedMatmul, Columns, Delta, ExactMatmul, FloatMatmul, GpuError, Halt, MixNorm, NormInput,
    NormMatmul, NormOutputs, Shared, Slice, Weights as DeviceWeights,
};
use smoe_kernels::Matrix;

use super::Builder;
use crate::backend::gpu::ops::{Input, Product};
use crate::backend::gpu::weights::{DeviceMatrix, Part, stackable};
use crate::weights::LayerFfn;

impl Builder<'_> {
    /// What the layer before `layer` left to be added.
    pub(super) fn delta_before(&self, layer: usize) -> Delta<'_> {
        let Some(before) = layer.checked_sub(1) else { return Delta::None };
        match &self.weights.layers[before].ffn {
            LayerFfn::Dense(_) => Delta::Plane(&self.planes.dense, None),
            LayerFfn::Moe { shared, shared_scale, .. } => Delta::Experts {
                outputs: &self.planes.outputs,
                weights: &self.planes.route_weights,
                top_k: self.spec.moe.top_k,
                shared: shared.as_ref().map(|_| Shared {
                    output: &self.planes.dense,
                    gate: shared_scale.as_ref().map(|_| &self.planes.gates),
                }),
            },
        }
    }

    /// The word behind the routing weights.
    pub(super) fn halt(&self) -> Halt<'_> {
        Halt { words: &self.planes.route_weights, at: self.tokens * self.spec.moe.top_k }
    }

    /// Stops at a halt if it adds anything.
    pub(super) fn norm(
        &self,
        weight: &Slice,
        delta: Delta<'_>,
        rows: Option<(&Slice, usize)>,
        tokens: usize,
        out: &Input,
    ) -> Result<MixNorm, GpuError> {
        let coded = out.coded();
        let outputs = NormOutputs { plane: Some(&out.float), coded: &coded };
        let (d, eps, hidden) = (self.spec.d_model, self.spec.rms_norm_eps, &self.planes.hidden);
        let halt = (!matches!(delta, Delta::None)).then(|| self.halt());
        let norm = MixNorm::halting(self.gpu, tokens, d, eps, hidden, weight, delta, rows, outputs, halt)?;
        Ok(norm.scaled(self.spec.multipliers.residual as f32))
    }

    /// `out[t, offset..] = W input[t]`, W being `matrices` one under the other.
    pub(in crate::backend::gpu) fn product(
        &mut self,
        matrices: &[Matrix<'_>],
        input: &Input,
        tokens: usize,
        out: &Slice,
        stride: usize,
    ) -> Result<Vec<Product>, GpuError> {
        let mut products = Vec::new();
        for (matrix, offset) in self.stacks(matrices)? {
            self.products_of(&matrix, input, tokens, out, stride, offset, &mut products)?;
        }
        Ok(products)
    }

    /// Matrices of one input, as many together as can be, and where the outputs of each begin.
    pub(super) fn stacks(&mut self, matrices: &[Matrix<'_>]) -> Result<Vec<(DeviceMatrix, usize)>, GpuError> {
        let mut stacks = Vec::new();
        let mut offset = 0;
        let mut rest = matrices;
        while !rest.is_empty() {
            let n = (2..=rest.len()).rev().find(|&n| stackable(&rest[..n])).unwrap_or(1);
            let (together, others) = rest.split_at(n);
            stacks.push((self.up.stack(together)?, offset));
            offset += together.iter().map(Matrix::rows).sum::<usize>();
            rest = others;
        }
        Ok(stacks)
    }

    /// One token's products with a coded and a float matrix, in one dispatch.
    pub(super) fn beside(
        &self,
        stacks: &[(DeviceMatrix, usize)],
        input: &Input,
        out: &Slice,
        stride: usize,
    ) -> Result<Option<Beside>, GpuError> {
        let [(coded, first), (float, second)] = stacks else { return Ok(None) };
        let (Some(tiles), [coded_part], [float_part]) =
            (coded.encoding.tiles(), coded.parts.as_slice(), float.parts.as_slice())
        else {
            return Ok(None);
        };
        let x = input.coded.iter().find(|x| x.suits(tiles, coded.cols));
        let Some(x) = x.filter(|_| !self.exact && float.encoding.is_float()) else { return Ok(None) };
        let columns = |offset: usize| Columns { plane: out.clone(), stride, offset };
        let weights = |matrix: &DeviceMatrix, part: &Part| {
            DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols, matrix.encoding)
        };
        Beside::products(
            self.gpu,
            (&weights(coded, coded_part), x, &columns(*first)),
            (&weights(float, float_part), &input.float, &columns(*second)),
        )
    }

    pub(super) fn products_of(
        &self,
        matrix: &DeviceMatrix,
        input: &Input,
        tokens: usize,
        out: &Slice,
        stride: usize,
        offset: usize,
        products: &mut Vec<Product>,
    ) -> Result<(), GpuError> {
        for part in &matrix.parts {
            let weights = DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols, matrix.encoding);
            let columns = Columns { plane: out.clone(), stride, offset: offset + part.first_row };
            products.push(match matrix.encoding.tiles() {
                Some(_) if self.exact => {
                    Product::Exact(ExactMatmul::new(self.gpu, &weights, &input.float, tokens, &columns)?)
                }
                Some(tiles) => {
                    let x = input.coded.iter().find(|x| x.suits(tiles, matrix.cols));
                    let x = x.expect("every group size of the weights has its plane");
                    Product::Coded(CodedMatmul::new(self.gpu, &weights, x, &columns)?)
                }
                None => Product::Float(FloatMatmul::new(self.gpu, &weights, &input.float, tokens, &columns)?),
            });
        }
        Ok(())
    }

    /// The product of a norm in one kernel, if that can be and is worth it.
    pub(super) fn norm_product(
        &self,
        weight: &Slice,
        delta: Delta<'_>,
        matrix: &DeviceMatrix,
        out: &Slice,
        stride: usize,
    ) -> Result<Option<NormMatmul>, GpuError> {
        let [part] = matrix.parts.as_slice() else { return Ok(None) };
        if self.exact || matrix.encoding.tiles().is_none() {
            return Ok(None);
        }
        let norm = NormInput {
            hidden: &self.planes.hidden,
            delta,
            residual: self.spec.multipliers.residual as f32,
            kept: &self.planes.kept,
            weight,
            eps: self.spec.rms_norm_eps,
        };
        let weights = DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols, matrix.encoding);
        NormMatmul::new(self.gpu, &weights, norm, &Columns::whole(out.clone(), stride))
    }
}

//! What the kernels of a token are given.

use crate::CudaError;
use crate::device::Buffer;
use crate::model::{LayerParts, MatrixBytes, Slots};
use crate::planes::{FLOAT_ROWS, Input, Kernels, Planes, whole};
use crate::program::{Arg, Launch};
use crate::shape::{GROUP, Shape, bits, float_name, shared_bytes};

pub(crate) fn bytes_of(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Records what is launched of a token.
pub(crate) struct Builder<'a> {
    pub(crate) kernels: Kernels<'a>,
    pub(crate) shape: &'a Shape,
    pub(crate) planes: &'a Planes,
    pub(crate) angles: Buffer,
    pub(crate) weights: Vec<Buffer>,
    pub(crate) body: Vec<Launch>,
}

impl Builder<'_> {
    /// Keeps what is on the card; gives its address.
    pub(crate) fn keep(&mut self, bytes: &[u8]) -> Result<Arg, CudaError> {
        let buffer = self.kernels.cuda.upload(bytes)?;
        let address = whole(&buffer);
        self.weights.push(buffer);
        Ok(address)
    }

    pub(crate) fn product(
        &mut self,
        matrix: &MatrixBytes<'_>,
        input: fn(&Planes) -> &Input,
        out: fn(&Planes) -> &Buffer,
        at: usize,
    ) -> Result<Launch, CudaError> {
        let buffer = self.kernels.cuda.upload(matrix.bytes)?;
        let launch = self.kernels.product(&buffer, matrix, input(self.planes), out(self.planes), at)?;
        self.weights.push(buffer);
        Ok(launch)
    }

    /// Queries, keys and values are one product where they can be.
    fn projections(&mut self, qkv: &[MatrixBytes<'_>; 3]) -> Result<(), CudaError> {
        let (first, like) = (qkv[0], |m: &MatrixBytes<'_>| m.encoding == qkv[0].encoding);
        let whole_blocks = |m: &MatrixBytes<'_>| bits(m.encoding).is_none() || m.rows.is_multiple_of(32);
        if qkv.iter().all(like) && qkv.iter().all(whole_blocks) {
            let bytes = qkv.map(|m| m.bytes).concat();
            let rows = qkv.iter().map(|m| m.rows).sum();
            let stacked = MatrixBytes { bytes: &bytes, rows, ..first };
            let launch = self.product(&stacked, |p| &p.input, |p| &p.projected, 0)?;
            self.body.push(launch);
            return Ok(());
        }
        let mut at = 0;
        for matrix in qkv {
            let launch = self.product(matrix, |p| &p.input, |p| &p.projected, at)?;
            self.body.push(launch);
            at += matrix.rows;
        }
        Ok(())
    }

    /// `kind`: what is added before (layer.cu).
    fn norm(&mut self, kind: u32, gain: &[f32]) -> Result<(), CudaError> {
        let gain = self.keep(bytes_of(gain))?;
        let p = self.planes;
        let delta = if kind == 1 { &p.delta } else { &p.outputs };
        let [normed, codes, cells] = p.input.args();
        let args = [
            whole(&p.x),
            whole(delta),
            whole(&p.chosen),
            Arg::Word(kind),
            Arg::Float(self.shape.residual_scale),
            gain,
            Arg::Float(self.shape.eps),
            normed,
            codes,
            cells,
        ];
        self.body.push(self.kernels.launch("add_norm", (1, 1), 512, args)?);
        Ok(())
    }

    pub(crate) fn layer(
        &mut self,
        index: usize,
        parts: &LayerParts<'_>,
        kv: &Buffer,
        slots: &Buffer,
    ) -> Result<(), CudaError> {
        let (s, p) = (self.shape, self.planes);
        self.norm(if index == 0 { 0 } else { 2 }, parts.attn_norm)?;
        self.projections(&parts.qkv)?;
        let gain = match parts.qk_norm {
            Some(norms) => self.keep(bytes_of(&norms.concat()))?,
            None => Arg::Long(0),
        };
        let (rows, at, tables) = (whole(&p.rows), whole(&p.at), whole(&p.tables));
        let heads = s.heads + 2 * s.kv_heads;
        let args = [
            whole(&p.projected),
            gain,
            whole(&self.angles),
            rows,
            at,
            tables,
            whole(&p.queries),
            whole(kv),
            Arg::Float(s.eps),
        ];
        self.body.push(self.kernels.launch("rope", (heads.div_ceil(4), 1), 128, args)?);
        let [mixed, codes, cells] = p.mixed.args();
        let scale = Arg::Float(s.score_scale / (s.head_dim as f32).sqrt());
        let (partial, counters) = (whole(&p.partial), whole(&p.counters));
        let args =
            [whole(&p.queries), whole(kv), rows, at, tables, partial, counters, mixed, codes, cells, scale];
        self.body.push(self.kernels.launch("attention", (s.heads, 8), 256, args)?);
        let o = self.product(&parts.o, |p| &p.mixed, |p| &p.delta, 0)?;
        self.body.push(o);
        self.norm(1, parts.ffn_norm)?;
        self.route(index, &parts.router)?;
        self.experts(&parts.slots, slots)
    }

    fn route(&mut self, index: usize, router: &MatrixBytes<'_>) -> Result<(), CudaError> {
        let (s, p) = (self.shape, self.planes);
        let name = float_name(router.encoding)
            .ok_or_else(|| CudaError::Compile { log: format!("no router of {}", router.encoding) })?;
        let weights = self.keep(router.bytes)?;
        let counter = Arg::Long(p.counters.at(4 * s.heads, 4));
        let args = [
            weights,
            whole(&p.input.floats),
            whole(&p.seen),
            Arg::Word(index as u32),
            whole(&p.at),
            counter,
            whole(&p.ids),
            whole(&p.chosen),
            Arg::Float(s.routed_scale),
        ];
        let grid = (s.experts.div_ceil(FLOAT_ROWS), 1);
        self.body.push(self.kernels.launch(&format!("router_{name}"), grid, 256, args)?);
        Ok(())
    }

    fn experts(&mut self, slots: &Slots, memory: &Buffer) -> Result<(), CudaError> {
        let (s, p) = (self.shape, self.planes);
        let piece = |bytes: usize| {
            assert!(bytes.is_multiple_of(16), "{bytes} bytes are no pieces");
            Arg::Long(bytes as u64 / 16)
        };
        let [gate, up, down] = slots.offsets.map(piece);
        let (groups, hidden_groups) = (s.d_model / GROUP, s.d_expert / GROUP);
        let [_, codes, cells] = p.input.args();
        let (ids, hidden, len) = (whole(&p.ids), whole(&p.expert_hidden), piece(slots.len));
        let (words, rows) = (Arg::Word(groups as u32), Arg::Word(s.d_expert as u32));
        let args = [whole(memory), ids, codes, cells, hidden, words, rows, len, gate, up];
        let grid = (s.d_expert.div_ceil(32), s.top_k);
        let launch = self.kernels.launch("expert_gate_up", grid, 256, args)?;
        self.body.push(Launch { shared: shared_bytes(groups, 2), ..launch });
        let (words, rows) = (Arg::Word(hidden_groups as u32), Arg::Word(s.d_model as u32));
        let args = [whole(memory), ids, hidden, whole(&p.outputs), words, rows, len, down];
        let grid = (s.d_model.div_ceil(32), s.top_k);
        let launch = self.kernels.launch("expert_down", grid, 256, args)?;
        self.body.push(Launch { shared: shared_bytes(hidden_groups, 1), ..launch });
        Ok(())
    }
}

/// Panics unless a layer's parts have the shape's sizes.
pub(crate) fn check(shape: &Shape, parts: &LayerParts<'_>) {
    let (d, heads, kv) = (shape.d_model, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let [q, k, v] = &parts.qkv;
    for (matrix, rows, cols) in
        [(q, heads, d), (k, kv, d), (v, kv, d), (&parts.o, d, heads), (&parts.router, shape.experts, d)]
    {
        assert!(matrix.rows == rows && matrix.cols == cols, "{} x {}", matrix.rows, matrix.cols);
    }
    assert!(parts.attn_norm.len() == d && parts.ffn_norm.len() == d, "a norm");
    if let Some(norms) = parts.qk_norm {
        assert!(norms.iter().all(|norm| norm.len() == shape.head_dim), "a norm of heads");
    }
    let tile = 1088;
    let (tall, wide) =
        (shape.d_expert.div_ceil(32) * (d / GROUP) * tile, d.div_ceil(32) * (shape.d_expert / GROUP) * tile);
    for (offset, len) in parts.slots.offsets.into_iter().zip([tall, tall, wide]) {
        assert!(offset + len <= parts.slots.len, "{len} bytes at {offset} of {}", parts.slots.len);
    }
}

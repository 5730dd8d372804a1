//! A whole model on a card.

use std::sync::Arc;

use smoe_format::Encoding;

use crate::build::{Builder, bytes_of, check};
use crate::device::{Buffer, Pinned};
use crate::planes::{Kernels, Planes, whole};
use crate::program::{Arg, Graph, Launch, Program};
use crate::shape::{Shape, bits, float_name, has_product};
use crate::{Cuda, CudaError};

/// A matrix of the backbone.
#[derive(Clone, Copy, Debug)]
pub struct MatrixBytes<'a> {
    /// As in the vault.
    pub bytes: &'a [u8],
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// What the bytes mean.
    pub encoding: Encoding,
}

/// Where an expert's tensors lie in its record: 4-bit codes.
#[derive(Clone, Copy, Debug)]
pub struct Slots {
    /// Bytes of a record.
    pub len: usize,
    /// First bytes of gate, up and down.
    pub offsets: [usize; 3],
}

/// The resident weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerParts<'a> {
    /// `[d_model]`.
    pub attn_norm: &'a [f32],
    /// Queries, keys, values.
    pub qkv: [MatrixBytes<'a>; 3],
    /// `[head_dim]` of queries, then of keys.
    pub qk_norm: Option<[&'a [f32]; 2]>,
    /// `[d_model, heads * head_dim]`.
    pub o: MatrixBytes<'a>,
    /// `[d_model]`.
    pub ffn_norm: &'a [f32],
    /// `[experts, d_model]`, floats.
    pub router: MatrixBytes<'a>,
    /// Its experts.
    pub slots: Slots,
}

/// A token of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its id.
    pub token: u32,
    /// Its position in its session.
    pub position: u32,
    /// Where the blocks of its session begin in the tables.
    pub table: u32,
}

/// A model whose weights are all on the card, and its cache of keys and values.
#[derive(Debug)]
pub struct Model {
    /// Before what it uses is freed.
    graph: Option<Graph>,
    shape: Shape,
    planes: Planes,
    /// The kernels of a token.
    body: Vec<Launch>,
    /// Norm and head of one token; the norm's second argument is its number.
    head: Vec<Launch>,
    /// By layer: keys and values, and experts.
    kv: Vec<Buffer>,
    slots: Vec<(Slots, Buffer)>,
    present: Vec<bool>,
    /// Everything else that kernels read.
    _weights: Vec<Buffer>,
    _program: Program,
    cuda: Arc<Cuda>,
    /// Tokens of the step.
    tokens: usize,
    /// For the host: logits of some tokens, and of their routers.
    logits: Pinned,
    seen: Pinned,
}

impl Model {
    /// Compiles the kernels and brings the resident weights to the card. `angles` has cosine and sine of each rotated pair,
    /// position by position.
    ///
    /// # Errors
    /// If kernels or weights are refused, or there is no room.
    ///
    /// # Panics
    /// If a matrix has not the size that the shape asks for.
    pub fn new<'a>(
        cuda: Arc<Cuda>,
        shape: Shape,
        angles: &[f32],
        embed: &MatrixBytes<'a>,
        layers: impl IntoIterator<Item = LayerParts<'a>>,
        final_norm: &[f32],
        head: &MatrixBytes<'a>,
    ) -> Result<Self, CudaError> {
        let refused = |what: &str| Err(CudaError::Compile { log: format!("no kernels for {what}") });
        if let Some(what) = shape.unsupported() {
            return refused(what);
        }
        assert!(angles.len() == shape.context * shape.rope_dim, "{} angles", angles.len());
        assert!(embed.rows == shape.vocab_size && embed.cols == shape.d_model, "an embedding");
        assert!(head.rows == shape.vocab_size && head.cols == shape.d_model, "a head");
        if !has_product(head.encoding) || !has_product(embed.encoding) {
            return refused("the head");
        }
        let program = Program::new(&cuda, &shape.constants())?;
        let planes = Planes::new(&cuda, &shape)?;
        let kernels = Kernels { cuda: &cuda, program: &program };
        let angles = cuda.upload(bytes_of(angles))?;
        let mut b = Builder {
            kernels,
            shape: &shape,
            planes: &planes,
            angles,
            weights: Vec::new(),
            body: Vec::new(),
        };
        let table = b.keep(embed.bytes)?;
        let name = match (float_name(embed.encoding), bits(embed.encoding)) {
            (Some(name), _) => name.to_owned(),
            (None, bits) => bits.unwrap_or_default().to_string(),
        };
        let args = [
            table,
            whole(&planes.rows),
            whole(&planes.at),
            whole(&planes.x),
            Arg::Float(shape.embedding_scale),
        ];
        b.body.push(b.kernels.launch(&format!("embed_{name}"), (1, 1), 512, args)?);
        let (mut kv, mut slots) = (Vec::new(), Vec::new());
        for (index, parts) in layers.into_iter().enumerate() {
            check(&shape, &parts);
            let cache = cuda.buffer(shape.block_bytes() * shape.blocks)?;
            let memory = cuda.buffer(parts.slots.len * shape.experts)?;
            b.layer(index, &parts, &cache, &memory)?;
            kv.push(cache);
            slots.push((parts.slots, memory));
        }
        assert!(slots.len() == shape.layers, "{} layers of {}", slots.len(), shape.layers);
        let p = &planes;
        let (scale, hidden) = (Arg::Float(shape.residual_scale), whole(&p.hidden));
        let args = [whole(&p.x), whole(&p.outputs), whole(&p.chosen), scale, hidden, whole(&p.at)];
        b.body.push(b.kernels.launch("leave", (1, 1), 512, args)?);
        let gain = b.keep(bytes_of(final_norm))?;
        let [normed, codes, cells] = p.input.args();
        let args = [hidden, Arg::Word(0), gain, Arg::Float(shape.eps), normed, codes, cells];
        let norm = b.kernels.launch("final_norm", (1, 1), 512, args)?;
        let product = b.product(head, |p| &p.input, |p| &p.logits, 0)?;
        let Builder { mut weights, body, angles, .. } = b;
        weights.push(angles);
        Ok(Self {
            graph: None,
            present: vec![false; shape.layers * shape.experts],
            body,
            head: vec![norm, product],
            kv,
            slots,
            _weights: weights,
            _program: program,
            tokens: 0,
            logits: cuda.pinned(shape.head_rows * shape.vocab_size)?,
            seen: cuda.pinned(shape.tokens * shape.layers * shape.experts)?,
            planes,
            shape,
            cuda,
        })
    }

    /// Kernels of a token, without its head.
    #[must_use]
    pub fn kernels(&self) -> usize {
        self.body.len()
    }

    /// Brings an expert's record.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If there is no such expert, or its record is longer than its slot.
    pub fn bring(&mut self, layer: usize, expert: usize, record: &[u8]) -> Result<(), CudaError> {
        let (slots, memory) = &self.slots[layer];
        assert!(
            expert < self.shape.experts && record.len() <= slots.len,
            "expert {expert} of {}",
            record.len()
        );
        self.cuda.write(memory, expert * slots.len, record)?;
        self.present[layer * self.shape.experts + expert] = true;
        Ok(())
    }

    /// Whether an expert is here.
    #[must_use]
    pub fn has(&self, layer: usize, expert: usize) -> bool {
        self.present[layer * self.shape.experts + expert]
    }

    /// Whether all are.
    #[must_use]
    pub fn has_all(&self) -> bool {
        self.present.iter().all(|present| *present)
    }

    /// Copies a block of every layer's cache.
    ///
    /// # Errors
    /// If the card fails.
    pub fn copy_block(&self, from: u32, to: u32) -> Result<(), CudaError> {
        let len = self.shape.block_bytes();
        self.kv.iter().try_for_each(|kv| self.cuda.copy(kv, from as usize * len, to as usize * len, len))
    }

    /// Hands all layers of these tokens to the card, in order, and does not wait. `tables` has the blocks of their
    /// sessions. A token sees those before it.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If experts are missing, or a token, position or block is beyond what the shape says.
    pub fn step(&mut self, places: &[Place], tables: &[u32]) -> Result<(), CudaError> {
        let s = &self.shape;
        assert!(self.has_all(), "experts are missing");
        assert!(places.len() <= s.tokens && tables.len() <= s.table_words, "{} tokens", places.len());
        assert!(tables.iter().all(|&block| (block as usize) < s.blocks), "a block beyond the cache");
        for place in places {
            let (position, table) = (place.position as usize, place.table as usize);
            assert!((place.token as usize) < s.vocab_size && position < s.context, "{place:?}");
            assert!(table + position / crate::BLOCK < tables.len(), "{place:?} of {} blocks", tables.len());
        }
        let rows: Vec<[u32; 4]> = places.iter().map(|p| [p.token, p.position, p.table, 0]).collect();
        self.tokens = places.len();
        self.cuda.write(&self.planes.rows, 0, bytemuck::cast_slice(&rows))?;
        self.cuda.write(&self.planes.tables, 0, bytemuck::cast_slice(tables))?;
        self.cuda.write(&self.planes.at, 0, &[0; 4])?;
        let graph = match &mut self.graph {
            Some(graph) => graph,
            None => {
                self.cuda.bind()?;
                // SAFETY: `Builder` gives each kernel the arguments of its declaration; they are addresses of buffers of
                // this model, which outlive its graph, and sizes that the shape was checked for. What the kernels read as
                // indices was checked above or is made by kernels below their own bounds.
                let record = || self.body.iter().try_for_each(|launch| unsafe { launch.run(&self.cuda) });
                self.graph.insert(Graph::record(&self.cuda, record)?)
            }
        };
        (0..places.len()).try_for_each(|_| graph.replay())
    }

    fn normed(&mut self, token: usize) -> Result<(), CudaError> {
        assert!(token < self.tokens, "token {token} of {}", self.tokens);
        self.head[0].args[1] = Arg::Word(token as u32);
        self.cuda.bind()?;
        // SAFETY: as in `step`; the token is one of the step's.
        unsafe { self.head[0].run(&self.cuda) }
    }

    /// Computes the logits of these tokens of the step, and brings them and all router logits to the host. Waits.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If there are more tokens than [`Shape::head_rows`], or one is not of the step.
    pub fn finish(&mut self, tokens: &[usize]) -> Result<(), CudaError> {
        assert!(tokens.len() <= self.shape.head_rows, "{} rows of logits at once", tokens.len());
        let queued = self.queue_outputs(tokens);
        // In any case: what is on its way to the host must have come before anyone looks there.
        let waited = self.cuda.wait();
        queued.and(waited)
    }

    fn queue_outputs(&mut self, tokens: &[usize]) -> Result<(), CudaError> {
        let vocab = self.shape.vocab_size;
        let seen = self.tokens * self.shape.layers * self.shape.experts;
        self.cuda.fetch(&self.planes.seen, &mut self.seen, 0, seen)?;
        for (i, &token) in tokens.iter().enumerate() {
            self.normed(token)?;
            // SAFETY: as in `step`.
            unsafe { self.head[1].run(&self.cuda) }?;
            self.cuda.fetch(&self.planes.logits, &mut self.logits, i * vocab, vocab)?;
        }
        Ok(())
    }

    /// What [`Self::finish`] brought: `[tokens, vocab_size]`.
    #[must_use]
    pub const fn logits(&self) -> &[f32] {
        self.logits.floats()
    }

    /// Multiplies them.
    pub fn scale_logits(&mut self, by: f32) {
        self.logits.floats_mut().iter_mut().for_each(|logit| *logit *= by);
    }

    /// Router logits that [`Self::finish`] brought, `[layers, tokens, experts]`.
    ///
    /// # Panics
    /// If `out` has another size.
    pub fn router(&self, out: &mut [f32]) {
        let (layers, tokens, n) = (self.shape.layers, self.tokens, self.shape.experts);
        assert!(out.len() == layers * tokens * n, "{} logits", out.len());
        for (i, row) in self.seen.floats()[..out.len()].chunks_exact(n).enumerate() {
            let (token, layer) = (i / layers, i % layers);
            out[(layer * tokens + token) * n..][..n].copy_from_slice(row);
        }
    }

    /// Hidden states of the step, `[tokens, d_model]`. Waits.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If `out` has another size.
    pub fn hidden(&self, out: &mut [f32]) -> Result<(), CudaError> {
        assert!(out.len() == self.tokens * self.shape.d_model, "{} values", out.len());
        self.cuda.read(&self.planes.hidden, 0, bytemuck::cast_slice_mut(out))
    }

    /// Hidden states of a token of the step after the final norm. Waits.
    ///
    /// # Errors
    /// If the card fails.
    ///
    /// # Panics
    /// If the token is not of the step, or `out` has another size.
    pub fn final_hidden(&mut self, token: usize, out: &mut [f32]) -> Result<(), CudaError> {
        assert!(out.len() == self.shape.d_model, "{} values", out.len());
        self.normed(token)?;
        self.cuda.read(&self.planes.input.floats, 0, bytemuck::cast_slice_mut(out))
    }
}

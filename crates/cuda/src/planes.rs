//! The memory that layers share, as one token runs at a time, and how products are cut.

use crate::device::Buffer;
use crate::model::MatrixBytes;
use crate::program::{Arg, Kernel, Launch, Program};
use crate::shape::{GROUP, Shape, bits, float_name, shared_bytes, warps};
use crate::{Cuda, CudaError};

/// Workgroups of attention's splits, and their floats besides a head's: layer.cu.
const SPLITS: usize = 8;
const PARTIAL_EXTRA: usize = 2;
/// Rows of float products, and of the router, in a workgroup.
pub(crate) const FLOAT_ROWS: usize = 8;

/// A row of floats and its int8 form.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) floats: Buffer,
    pub(crate) codes: Buffer,
    pub(crate) cells: Buffer,
    cols: usize,
}

impl Input {
    fn new(cuda: &Cuda, cols: usize) -> Result<Self, CudaError> {
        Ok(Self {
            floats: cuda.buffer(4 * cols)?,
            codes: cuda.buffer(cols)?,
            cells: cuda.buffer(8 * cols / GROUP)?,
            cols,
        })
    }

    /// The addresses: floats, codes, cells.
    pub(crate) fn args(&self) -> [Arg; 3] {
        [whole(&self.floats), whole(&self.codes), whole(&self.cells)]
    }
}

/// A buffer as an argument.
pub(crate) fn whole(buffer: &Buffer) -> Arg {
    Arg::Long(buffer.at(0, buffer.len()))
}

/// The planes of a token, and of a step.
#[derive(Debug)]
pub(crate) struct Planes {
    /// Hidden states of the token.
    pub(crate) x: Buffer,
    pub(crate) input: Input,
    pub(crate) projected: Buffer,
    pub(crate) queries: Buffer,
    pub(crate) mixed: Input,
    /// What attention adds.
    pub(crate) delta: Buffer,
    pub(crate) ids: Buffer,
    pub(crate) chosen: Buffer,
    pub(crate) expert_hidden: Buffer,
    /// Outputs of the chosen experts.
    pub(crate) outputs: Buffer,
    pub(crate) partial: Buffer,
    /// A counter for each head, and the router's.
    pub(crate) counters: Buffer,
    /// Tokens of the step: token, position, where its blocks begin in the tables.
    pub(crate) rows: Buffer,
    /// The token that comes.
    pub(crate) at: Buffer,
    pub(crate) tables: Buffer,
    /// Router logits, `[tokens, layers, experts]`.
    pub(crate) seen: Buffer,
    /// Hidden states of the step's tokens.
    pub(crate) hidden: Buffer,
    pub(crate) logits: Buffer,
}

impl Planes {
    pub(crate) fn new(cuda: &Cuda, shape: &Shape) -> Result<Self, CudaError> {
        let (d, heads) = (shape.d_model, shape.heads * shape.head_dim);
        let floats = |n: usize| cuda.buffer(4 * n);
        Ok(Self {
            x: floats(d)?,
            input: Input::new(cuda, d)?,
            projected: floats(heads + 2 * shape.kv_heads * shape.head_dim)?,
            queries: floats(heads)?,
            mixed: Input::new(cuda, heads)?,
            delta: floats(d)?,
            ids: floats(shape.top_k)?,
            chosen: floats(shape.top_k)?,
            expert_hidden: floats(shape.top_k * shape.d_expert)?,
            outputs: floats(shape.top_k * d)?,
            partial: floats(shape.heads * SPLITS * (shape.head_dim + PARTIAL_EXTRA))?,
            counters: floats(shape.heads + 1)?,
            rows: floats(4 * shape.tokens)?,
            at: floats(1)?,
            tables: floats(shape.table_words)?,
            seen: floats(shape.tokens * shape.layers * shape.experts)?,
            hidden: floats(shape.tokens * d)?,
            logits: floats(shape.vocab_size)?,
        })
    }
}

/// The kernels by name, and what is launched of them.
pub(crate) struct Kernels<'a> {
    pub(crate) cuda: &'a Cuda,
    pub(crate) program: &'a Program,
}

impl Kernels<'_> {
    pub(crate) fn named(&self, name: &str) -> Result<Kernel, CudaError> {
        self.program.kernel(name)
    }

    /// A kernel without shared memory of its own.
    pub(crate) fn launch(
        &self,
        name: &str,
        grid: (usize, usize),
        threads: u32,
        args: impl IntoIterator<Item = Arg>,
    ) -> Result<Launch, CudaError> {
        let grid = (grid.0 as u32, grid.1 as u32);
        Ok(Launch { kernel: self.named(name)?, grid, threads, shared: 0, args: args.into_iter().collect() })
    }

    /// `out[at..] = W input`, `weights` having the matrix's bytes.
    pub(crate) fn product(
        &self,
        weights: &Buffer,
        matrix: &MatrixBytes<'_>,
        input: &Input,
        out: &Buffer,
        at: usize,
    ) -> Result<Launch, CudaError> {
        let MatrixBytes { rows, cols, encoding, .. } = *matrix;
        assert!(cols == input.cols, "{cols} columns of {}", input.cols);
        assert!(Some(weights.len()) == encoding.tensor_bytes(rows, cols), "{} bytes", weights.len());
        let out = Arg::Long(out.at(4 * at, 4 * rows));
        let [floats, codes, cells] = input.args();
        if let Some(name) = float_name(encoding) {
            let args = [whole(weights), floats, out, Arg::Word(cols as u32 / 8), Arg::Word(rows as u32)];
            return self.launch(&format!("float_{name}"), (rows.div_ceil(FLOAT_ROWS), 1), 256, args);
        }
        let bits =
            bits(encoding).ok_or_else(|| CudaError::Compile { log: format!("no product of {encoding}") })?;
        let (blocks, groups) = (rows.div_ceil(32), cols / GROUP);
        let warps = warps(bits, blocks, groups);
        let args = [whole(weights), codes, cells, out, Arg::Word(groups as u32), Arg::Word(rows as u32)];
        let launch = self.launch(&format!("coded_{bits}_{warps}"), (blocks, 1), 32 * warps, args)?;
        Ok(Launch { shared: shared_bytes(groups, 1), ..launch })
    }
}

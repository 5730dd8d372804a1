//! From projections to what attention works on: [`RopeAppend`], and how keys and values lie in a cache.

use crate::draft::{Draft, demand};
use crate::shader::{Access, Op};
use crate::{Gpu, GpuError, Slice, Step};

const HEADS: &str = concat!(
    include_str!("wgsl/rope_pairs.wgsl"),
    include_str!("wgsl/rope_heads.wgsl"),
    include_str!("wgsl/rope_store.wgsl")
);
const ROPE: &str = include_str!("wgsl/rope.wgsl");

/// Positions of a block of the cache.
pub const KV_BLOCK: usize = 32;
/// Widest head.
pub(crate) const MAX_DIM: usize = 256;
/// Heads of a workgroup.
const AT_ONCE: usize = 4;

/// How keys and values are stored: the CPU's rows, byte by byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// f32.
    F32,
    /// IEEE halves.
    F16,
    /// Signed bytes, and one f32 scale in the last four bytes of the row.
    Q8,
}

impl KvFormat {
    /// Its number in the kernels.
    pub(crate) const fn number(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8 => 2,
        }
    }

    /// Bytes of a row of `dim` elements: what they need, rounded up to a multiple of 16.
    pub(crate) const fn row_bytes(self, dim: usize) -> usize {
        let bytes = match self {
            Self::F32 => 4 * dim,
            Self::F16 => 2 * dim,
            Self::Q8 => dim + 4,
        };
        bytes.next_multiple_of(16)
    }
}

/// The keys and values of a layer on the device.
///
/// The row of position p of a session, kv head h, is at byte
/// `(((2 * b + plane) * n_kv_heads + h) * KV_BLOCK + p % KV_BLOCK) * row_bytes`: plane 0 has the keys, 1 the
/// values, and block b is entry `p / KV_BLOCK` of the session's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// How elements are stored.
    pub format: KvFormat,
    /// Heads of keys and values.
    pub n_kv_heads: usize,
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

impl KvLayout {
    /// Bytes of a row, key or value: what the wider one needs, rounded up to a multiple of 16.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.format.row_bytes(if self.head_dim > self.value_dim { self.head_dim } else { self.value_dim })
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        2 * self.n_kv_heads * KV_BLOCK * self.row_bytes()
    }

    /// Panics unless the kernels can work on it.
    pub(crate) fn check(&self, cache: &Slice) {
        let fits = |dim: usize| dim.is_multiple_of(4) && (4..=MAX_DIM).contains(&dim);
        assert!(self.n_kv_heads > 0 && fits(self.head_dim) && fits(self.value_dim), "heads of {self:?}");
        assert!(cache.len() >= self.block_bytes() as u64, "a cache without blocks");
        assert!(cache.len() >> 34 == 0, "a cache of {} bytes", cache.len());
    }
}

/// Which elements of a head RoPE turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairs {
    /// i and i + rope_dim / 2.
    Halves,
    /// 2i and 2i + 1.
    Neighbours,
}

/// RMSNorm of queries and keys before RoPE.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// Weights: the queries', then the keys'; `[head_dim]` each, or `[n_heads * head_dim]` and
    /// `[n_kv_heads * head_dim]` if `whole`.
    pub weights: &'a Slice,
    /// Epsilon.
    pub eps: f32,
    /// The norm is over all heads of a token as one.
    pub whole: bool,
}

/// The projections of a step, `[tokens, stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Projections<'a> {
    /// The plane.
    pub plane: &'a Slice,
    /// Columns of a row.
    pub stride: usize,
    /// First columns of queries, keys and values.
    pub at: [usize; 3],
    /// Added to every row, `[stride]`.
    pub bias: Option<&'a Slice>,
}

/// The angles of RoPE.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// Cosine and sine, `[positions, dim / 2]` pairs of f32.
    pub table: &'a Slice,
    /// Positions of the table.
    pub positions: usize,
    /// Elements of a head that are rotated, its first ones.
    pub dim: usize,
    /// Which are a pair.
    pub pairs: RopePairs,
}

/// Whose tokens a step has.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Per token four u32: its position, where its session's table begins in `tables`, the first position that
    /// it sees, 0.
    pub rows: &'a Slice,
    /// Numbers of blocks, u32.
    pub tables: &'a Slice,
}

/// What queries, keys and values are made of.
#[derive(Clone, Copy, Debug)]
pub struct RopeInput<'a> {
    /// As the products left them.
    pub projections: Projections<'a>,
    /// None if there is no norm.
    pub norm: Option<QkNorm<'a>>,
    /// Of all positions.
    pub angles: Angles<'a>,
}

impl<'a> RopeInput<'a> {
    /// Panics if a shape does not match.
    pub(crate) fn check(&self, tokens: usize, n_heads: usize, kv: KvLayout) {
        let Self { projections: Projections { plane, stride, at: [q_at, k_at, v_at], bias }, norm, angles } =
            *self;
        let KvLayout { n_kv_heads, head_dim, value_dim, .. } = kv;
        demand(plane, tokens * stride, "projections");
        for (at, width) in
            [(q_at, n_heads * head_dim), (k_at, n_kv_heads * head_dim), (v_at, n_kv_heads * value_dim)]
        {
            assert!(at + width <= stride, "columns {at} + {width} of {stride}");
        }
        assert!(
            angles.dim.is_multiple_of(2) && (2..=head_dim).contains(&angles.dim),
            "{} rotated of {head_dim}",
            angles.dim
        );
        demand(angles.table, angles.positions * angles.dim, "angles");
        bias.iter().for_each(|bias| demand(bias, stride, "biases of projections"));
        if let Some(norm) = norm {
            let heads = if norm.whole { n_heads + n_kv_heads } else { 2 };
            demand(norm.weights, heads * head_dim, "weights of the QK-norm");
        }
    }

    /// Buffers that it binds.
    pub(crate) fn bindings(&self) -> usize {
        2 + usize::from(self.projections.bias.is_some()) + usize::from(self.norm.is_some())
    }

    /// Epsilon of its norm.
    pub(crate) fn eps(&self) -> f32 {
        self.norm.map_or(1.0, |norm| norm.eps)
    }

    /// rope_heads.wgsl and what it needs but HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, for so many heads of a workgroup.
    pub(crate) fn draft(&self, draft: Draft<'a>, kv: KvLayout, at_once: usize) -> Draft<'a> {
        let Self { projections: Projections { plane, stride, at: [q_at, k_at, v_at], bias }, norm, angles } =
            *self;
        let draft = draft
            .constant("HEADS_AT_ONCE", at_once)
            .constant("WIDEST", kv.head_dim.max(kv.value_dim))
            .constant("HALF", angles.dim / 2)
            .constant("STRIDE", stride)
            .constant("Q_AT", q_at)
            .constant("K_AT", k_at)
            .constant("V_AT", v_at)
            .constant("TYPE", kv.format.number())
            .constant("ROW_WORDS", kv.row_bytes() / 4)
            .flag("NORM", norm.is_some())
            .flag("WHOLE", norm.is_some_and(|norm| norm.whole))
            .flag("INTERLEAVED", angles.pairs == RopePairs::Neighbours)
            .buffer("plane", "f32", Access::Read, plane)
            .buffer("angles", "vec2<f32>", Access::Read, angles.table);
        let draft = match bias {
            Some(bias) => draft
                .buffer("bias", "f32", Access::Read, bias)
                .text("fn projected(token: u32, column: u32) -> f32 { ")
                .text("return plane[token * STRIDE + column] + bias[column]; }\n"),
            None => draft
                .text("fn projected(token: u32, column: u32) -> f32 { ")
                .text("return plane[token * STRIDE + column]; }\n"),
        };
        let draft = match norm {
            Some(norm) => draft
                .buffer("norms", "f32", Access::Read, norm.weights)
                .text("fn norm_weight(at: u32) -> f32 { return norms[at]; }\n")
                .text("fn normed(x: f32, w: f32, inverse: f32) -> f32 { return w * (x * inverse); }\n"),
            None => draft
                .text("fn norm_weight(at: u32) -> f32 { return 1.0; }\n")
                .text("fn normed(x: f32, w: f32, inverse: f32) -> f32 { return x; }\n"),
        };
        draft.text(HEADS)
    }
}

/// Bias, QK-norm, RoPE; queries to a plane, keys and values to the cache.
///
/// `q = turn(norm(plane + bias))` and so on, in one dispatch. The bits are those of the CPU (`rms_norm_in_place`,
/// `rope`, `store_kv_row`), but where numbers below 1.2e-38 play a part, or the sum under a root is beyond all numbers.
#[derive(Clone, Debug)]
pub struct RopeAppend {
    op: Op,
    tokens: usize,
    parts: usize,
    eps: f32,
}

impl RopeAppend {
    /// For up to `tokens` tokens of `n_heads` query heads; `queries` is `[tokens, n_heads * head_dim]`.
    ///
    /// Positions must be of the table of angles, blocks of the cache, and no two tokens of a step may have the
    /// same row of it: the device does not check.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a shape does not match, or a head is wider than 256 or no multiple of 4.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        n_heads: usize,
        kv: KvLayout,
        input: RopeInput<'_>,
        rows: Rows<'_>,
        queries: &Slice,
        cache: &Slice,
    ) -> Result<Self, GpuError> {
        let KvLayout { n_kv_heads, head_dim, value_dim, .. } = kv;
        kv.check(cache);
        assert!(n_heads > 0 && n_heads.is_multiple_of(n_kv_heads), "{n_heads} heads of {n_kv_heads}");
        input.check(tokens, n_heads, kv);
        demand(rows.rows, 4 * tokens, "rows");
        demand(queries, tokens * n_heads * head_dim, "queries");
        let draft = Draft::default()
            .constant("HEADS", n_heads)
            .constant("KV_HEADS", n_kv_heads)
            .constant("HEAD_DIM", head_dim)
            .constant("VALUE_DIM", value_dim)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("tables", "u32", Access::Read, rows.tables)
            .buffer("out", "f32", Access::Write, queries)
            .buffer("cache", "u32", Access::Write, cache);
        let op = input.draft(draft.float(64, 4), kv, AT_ONCE).text(ROPE).op(gpu, "rope")?;
        let parts = (n_heads + 2 * n_kv_heads).div_ceil(AT_ONCE);
        Ok(Self { op, tokens, parts, eps: input.eps() })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        step.run(&self.op, &[self.eps.to_bits()], [self.parts as u32, tokens as u32, 1]);
    }
}

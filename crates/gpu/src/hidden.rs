//! The hidden values of experts: what gate and up leave for down.

use smoe_format::tile::ROWS;

use crate::{CodedPlane, ExpertLayout, Gpu, GpuError, Slice};

/// Most experts of a token whose hidden values stay floats.
pub(crate) const LONE_PAIRS: usize = 64;

/// What gate, up and down of one token hand over: f32 hidden values, which down quantises itself.
#[derive(Clone, Debug)]
pub(crate) struct Lone {
    /// `[top_k, d_expert]` f32.
    pub(crate) values: Slice,
    /// `[top_k, d_expert rounded up to blocks]`, where gates and ups meet: no sum, whenever no kernel is at work.
    pub(crate) post: Slice,
}

impl Lone {
    fn new(gpu: &Gpu, layout: &ExpertLayout, pairs: usize) -> Result<Self, GpuError> {
        let (pairs, rows) = (pairs.min(LONE_PAIRS), layout.d_expert());
        let words = pairs * rows.next_multiple_of(ROWS);
        let values = gpu.buffer("hidden values of a token's experts", (4 * pairs * rows) as u64)?;
        let post = gpu.buffer("sums of gates and ups", (4 * words) as u64)?;
        gpu.write(&post, 0, bytemuck::cast_slice(&vec![u32::MAX; words]));
        Ok(Self { values, post })
    }
}

/// The hidden values by place in the work list. Layers may share them: nothing is kept from one to the next.
#[derive(Clone, Debug)]
pub struct Hidden {
    pub(crate) values: Values,
    /// `[pairs, d_expert]` f32 of gate and of up, where no one kernel multiplies with both.
    pub(crate) apart: Option<[Slice; 2]>,
}

/// The form that down needs.
#[derive(Clone, Debug)]
pub(crate) enum Values {
    /// int8 in down's groups; and what a lone token's pairs have in its place.
    Coded(CodedPlane, Lone),
    /// `[pairs, d_expert]` f32.
    Float(Slice),
}

impl Hidden {
    /// Room for `pairs` pairs.
    ///
    /// # Errors
    /// If the device has no room.
    pub fn new(gpu: &Gpu, layout: &ExpertLayout, pairs: usize) -> Result<Self, GpuError> {
        let plane = |what| gpu.buffer(what, (4 * pairs * layout.d_expert()) as u64);
        let apart = match layout.fused() {
            Some(_) => None,
            None => Some([plane("gates of experts")?, plane("ups of experts")?]),
        };
        let values = match layout.tiles(2) {
            Some(down) => {
                let plane = CodedPlane::new(gpu, pairs, layout.d_expert(), down.group())?;
                Values::Coded(plane, Lone::new(gpu, layout, pairs)?)
            }
            None => Values::Float(plane("hidden values of experts")?),
        };
        Ok(Self { values, apart })
    }

    /// The values as int8, if down takes codes.
    #[must_use]
    pub const fn coded(&self) -> Option<&CodedPlane> {
        match &self.values {
            Values::Coded(plane, _) => Some(plane),
            Values::Float(_) => None,
        }
    }
}

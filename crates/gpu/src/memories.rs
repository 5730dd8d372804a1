//! Where the weights of a kernel lie.

/// The memories of a kernel's weights.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memories {
    /// The first binding.
    One,
    /// That, and the binding of this number behind it: a work list says of each expert where it lies.
    Two(u32),
}

impl Memories {
    /// A constant, if there is one, and the text by which a kernel reads.
    pub(crate) const fn text(self) -> (Option<(&'static str, u32)>, &'static str) {
        match self {
            Self::One => (None, include_str!("wgsl/memory_one.wgsl")),
            Self::Two(binding) => (Some(("BEHIND", binding)), include_str!("wgsl/memory_two.wgsl")),
        }
    }

    /// What reads one of four where words are vectors.
    pub(crate) const fn part(self) -> &'static str {
        match self {
            Self::One => include_str!("wgsl/memory_one_part.wgsl"),
            Self::Two(_) => include_str!("wgsl/memory_two_part.wgsl"),
        }
    }
}

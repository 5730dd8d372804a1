//! f32 planes to int8 planes, and what the device's arithmetic is.

use smoe_format::{Encoding, Table, Uniform};

use crate::{Access, CodedPlane, Gpu, GpuError, Op, Shader, Slice, Step};

/// Functions `divide` and `quantise`.
pub(crate) const QUANTISE: &str = include_str!("wgsl/quantise.wgsl");
/// The kernels that quantise whole rows.
pub(crate) const TO_PLANE: &str = include_str!("wgsl/quantise_plane.wgsl");
/// `level_pairs` by `levels`.
const LEVEL_PAIRS: &str = include_str!("wgsl/coded_levels_pairs.wgsl");
/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Most workgroups along an axis of a grid.
pub(crate) const GRID: usize = 65_535;

/// A number that the compiler cannot know: drivers simplify what they know, as if floats were reals.
pub(crate) const HIDE: &str =
    "fn hide(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ p.nothing); }\n";

/// A shader's text: constants, then its parts. They declare the immediates `p`, with `nothing`, which is 0, as the last.
pub(crate) fn text(constants: &[(&str, u32)], parts: &[&str]) -> String {
    let constants = constants.iter().map(|(name, value)| format!("const {name}: u32 = {value}u;\n"));
    let parts = parts.iter().copied().chain([HIDE]).map(str::to_owned);
    constants.chain(parts).collect()
}

/// A shader's text, with `fma2` and `fma4` of vectors, and `PLAYED`. Where the device's `fma` is not fused, they and `fma` are
/// played: such a device is a program, for tests, and these are to see the bits that matter.
pub(crate) fn source(gpu: &Gpu, constants: &[(&str, u32)], parts: &[&str]) -> Result<String, GpuError> {
    Ok(if gpu.fused_fma()? {
        text(constants, parts) + include_str!("wgsl/quantise_fma.wgsl")
    } else {
        played(text(constants, parts))
    })
}

/// Repeated calls, as functions of the source: one by one with literals, as then all that they index lives in
/// registers; or, as fits a program that plays a device, in loops, which compile ten times faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeated {
    Lists,
    Loops,
}

impl Repeated {
    pub(crate) fn on(gpu: &Gpu) -> Result<Self, GpuError> {
        Ok(if gpu.fused_fma()? { Self::Lists } else { Self::Loops })
    }

    /// A function of `n` calls, each given its number.
    pub(crate) fn calls(self, head: &str, n: u32, call: impl Fn(&str) -> String) -> String {
        let body = match self {
            Self::Lists => (0..n).map(|i| format!("    {}\n", call(&format!("{i}u")))).collect(),
            Self::Loops => format!("    for (var i = 0u; i < {n}u; i++) {{ {} }}\n", call("i")),
        };
        format!("fn {head} {{\n{body}}}\n")
    }

    /// The same for the tokens that there are, up to `n`, of which there is one at least.
    pub(crate) fn tokens(self, head: &str, n: u32, call: impl Fn(&str) -> String) -> String {
        self.calls(head, n, |t| match t {
            "0u" => call(t),
            t => format!("if ((*job).count > {t}) {{ {} }}", call(t)),
        })
    }
}

fn played(text: String) -> String {
    let one = include_str!("wgsl/quantise_fma_played.wgsl");
    let several = |n: &str| {
        let names = ["held1", "Two1", "two_sum1", "upper1", "fma1"];
        let typed = ["f32", "u32"]
            .into_iter()
            .fold(one.to_owned(), |text, number| text.replace(number, &format!("vec{n}<{number}>")));
        names.into_iter().fold(typed, |text, name| text.replace(name, &name.replace('1', n)))
    };
    [text.replace("fma(", "fma1("), one.to_owned(), several("2"), several("4"), PLAYED.to_owned()].concat()
}

/// What coded.wgsl asks.
const PLAYED: &str = "const PLAYED: bool = true;\n";

/// Quantises the rows of an f32 plane: what coded weights are multiplied by.
///
/// The bits are those of the CPU's `Activations::quantise`, for groups whose largest
/// magnitude is 0 or from 1e-35 on: below that its scale is subnormal, which a device may take for zero.
#[derive(Clone, Debug)]
pub struct Quantise {
    op: Op,
    tokens: usize,
    cols: usize,
    groups: usize,
    /// Lanes of a group.
    team: usize,
}

impl Quantise {
    /// From `x`, `[out.tokens, out.cols]`, to `out`.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If `x` is too short, or `out` has groups of another size than 16, 32, 64 or 128, or no columns.
    pub fn new(gpu: &Gpu, x: &Slice, out: &CodedPlane) -> Result<Self, GpuError> {
        assert_plane(x, out.tokens, out.cols);
        assert!(out.cols > 0 && matches!(out.group, 16 | 32 | 64 | 128), "{} in {}", out.cols, out.group);
        let team = gpu.team(out.group);
        let constants =
            [("GROUP", out.group as u32), ("TEAM", team as u32), ("THREADS", THREADS), ("OUT", 1)];
        let parts = [QUANTISE, include_str!("wgsl/quantise_input.wgsl"), TO_PLANE];
        let kernel = gpu.kernel(&Shader {
            name: "quantise",
            source: source(gpu, &constants, &parts)?.into(),
            bindings: &[Access::Read, Access::Write, Access::Write],
        })?;
        let op = gpu.bind(&kernel, &[x, &out.codes, &out.cells])?;
        Ok(Self { op, tokens: out.tokens, cols: out.cols, groups: out.groups(), team })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let parts = (self.team * self.groups).div_ceil(THREADS as usize) as u32;
        step.run(&self.op, &[self.cols as u32, self.groups as u32], [parts, tokens as u32, 1]);
    }
}

/// Asserts that `slice` holds `[rows, cols]` f32.
pub(crate) fn assert_plane(slice: &Slice, rows: usize, cols: usize) {
    assert!(slice.len() >= (rows * cols * 4) as u64, "{} bytes for [{rows}, {cols}]", slice.len());
    assert!(rows <= GRID, "{rows} rows");
}

/// The constants that say how a coded matrix lies: `LOW`, `HIGH`, `TILE_GROUP`, `AFFINE`.
pub(crate) fn tile_constants(uniform: Uniform) -> [(&'static str, u32); 4] {
    let [low, high] = smoe_format::tile::plane_widths(uniform.bits());
    [
        ("LOW", u32::from(low)),
        ("HIGH", u32::from(high)),
        ("TILE_GROUP", uniform.group() as u32),
        ("AFFINE", u32::from(uniform.zero() == smoe_format::Zero::Affine)),
    ]
}

/// `levels`: four codes in each word to the levels that they name, as signed bytes, all more than they are by the number
/// beside it, and `level_pairs` of eight; without a table, codes as they are. A tree of choices, one for each bit of a code: a lookup by a number that
/// is not constant would leave the registers.
pub(crate) fn levels(encoding: Encoding) -> (String, u32) {
    let Encoding::Table(table) = encoding else {
        let same = "fn levels(codes: vec4<u32>) -> vec4<u32> { return codes; }\n";
        return ([same, LEVEL_PAIRS].concat(), 0);
    };
    if table.levels() == Table::MXFP4.levels() {
        return (include_str!("wgsl/coded_levels_e2m1.wgsl").to_owned(), 12);
    }
    let bytes = |level: &i8| u32::from_ne_bytes([level.cast_unsigned(); 4]);
    let mut nodes: Vec<String> =
        table.levels().iter().map(|level| format!("vec4({}u)", bytes(level))).collect();
    let mut masks = String::new();
    for bit in 0..table.bits() {
        masks += &format!("    let bit{bit} = ((codes >> vec4({bit}u)) & vec4(0x01010101u)) * vec4(255u);\n");
        nodes = nodes.chunks(2).map(|two| format!("choose({}, {}, bit{bit})", two[0], two[1])).collect();
    }
    let tree = format!(
        "fn choose(a: vec4<u32>, b: vec4<u32>, bits: vec4<u32>) -> vec4<u32> {{ return a ^ ((a ^ b) & bits); }}\n\
         fn levels(codes: vec4<u32>) -> vec4<u32> {{\n{masks}    return {};\n}}\n",
        nodes.concat()
    );
    (tree + LEVEL_PAIRS, 0)
}

impl Gpu {
    /// Whether a fused multiply-add is rounded once here, and quotients are rounded correctly by way of it: then
    /// coded products have the CPU's bits. Runs a kernel the first time, and remembers.
    ///
    /// # Errors
    /// If the device fails.
    pub fn fused_fma(&self) -> Result<bool, GpuError> {
        if let Some(&fused) = self.fused.get() {
            return Ok(fused);
        }
        let fused = self.probe()?;
        Ok(*self.fused.get_or_init(|| fused))
    }

    fn probe(&self) -> Result<bool, GpuError> {
        let pairs = probe_pairs();
        let constants = [("GROUP", 64), ("TEAM", 4), ("THREADS", 64)];
        let kernel = self.kernel(&Shader {
            name: "probe of arithmetic",
            source: text(&constants, &[QUANTISE, include_str!("wgsl/quantise_probe.wgsl")]).into(),
            bindings: &[Access::Read, Access::Write],
        })?;
        let bytes = (pairs.len() * 8) as u64;
        let (input, output) = (self.buffer("probe", bytes)?, self.buffer("probe", bytes)?);
        self.write(&input, 0, bytemuck::cast_slice(&pairs));
        let op = self.bind(&kernel, &[&input, &output])?;
        let mut step = self.step();
        step.run(&op, &[], [pairs.len() as u32 / 64, 1, 1]);
        let submitted = step.submit();
        self.wait(&submitted)?;
        let out = self.download(&output)?;
        let found = out.as_chunks::<4>().0.as_chunks::<2>().0.iter().map(|pair| pair.map(f32::from_le_bytes));
        Ok(pairs.iter().zip(found).all(|(&[a, b], [quotient, rest])| {
            quotient.to_bits() == (a / b).to_bits() && rest.to_bits() == a.mul_add(b, -(a * b)).to_bits()
        }))
    }
}

/// Operands as the kernels have them: 127 / x, x / 127, x / (1 + e), and random ones. None is zero, and nothing
/// that is made of them subnormal.
fn probe_pairs() -> Vec<[f32; 2]> {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let mut float = move |exponents: u32| {
        // 1 to 2, by a power of two from `-exponents` to `exponents`.
        let exponent = 127 - exponents + random() % (2 * exponents + 1);
        f32::from_bits((exponent << 23) | (random() & 0x7f_ffff))
    };
    (0..512)
        .map(|i| match i % 4 {
            0 => [127.0, float(30)],
            1 => [float(30), 127.0],
            2 => [float(6), 1.0 + float(20)],
            _ => [float(20), float(20)],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    /// `hand` in coded.wgsl divides the activations' scale by the largest code this way.
    #[test]
    fn dividing_by_a_largest_code_in_three_operations_rounds_correctly() {
        for m in [3.0f32, 7.0, 15.0, 31.0, 63.0, 255.0] {
            let inverse = 1.0 / m;
            for mantissa in 0..1u32 << 23 {
                let x = f32::from_bits((127 << 23) | mantissa);
                let q = x * inverse;
                let q = (-q).mul_add(m, x).mul_add(inverse, q);
                assert_eq!(q.to_bits(), (x / m).to_bits(), "{x} / {m}");
            }
        }
    }

    /// Random operands of exponents near and far, with sums that cancel and sums that tie.
    fn triples() -> Vec<[f32; 4]> {
        let mut state = 7u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        let mut float = move |span: u32| {
            let exponent = 127 - span / 2 + random() % (span + 1);
            f32::from_bits(
                random() << 31 | exponent << 23 | random() & (0x7f_ffff << (random() % 20)) & 0x7f_ffff,
            )
        };
        (0..4096)
            .map(|i| {
                let (a, b) = (float(20), float(20));
                let c = match i % 4 {
                    0 => -(a * b),
                    1 => float(60),
                    2 => a * b * float(2),
                    _ => -(a * b) * (1.0 + float(0) * 1e-6),
                };
                [a, b, c, a.mul_add(b, c)]
            })
            .collect()
    }

    #[test]
    fn played_multiply_adds_are_rounded_once() {
        use super::*;
        let Ok(gpu) = Gpu::open(None, crate::Software::Accept) else {
            eprintln!("SKIPPED: no device");
            return;
        };
        let triples = triples();
        let source = "
            @group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
            @group(0) @binding(1) var<storage, read_write> out: array<f32>;
            @compute @workgroup_size(64)
            fn main(@builtin(global_invocation_id) id: vec3<u32>) {
                let v = x[id.x];
                out[id.x] = fma(v.x, v.y, v.z);
            }
";
        let make = || -> Result<Vec<u8>, GpuError> {
            let kernel = gpu.kernel(&Shader {
                name: "played",
                source: played(source.to_owned()).into(),
                bindings: &[Access::Read, Access::Write],
            })?;
            let x = gpu.buffer("x", (triples.len() * 16) as u64)?;
            let out = gpu.buffer("out", (triples.len() * 4) as u64)?;
            gpu.write(&x, 0, bytemuck::cast_slice(&triples));
            let op = gpu.bind(&kernel, &[&x, &out])?;
            let mut step = gpu.step();
            step.run(&op, &[], [triples.len() as u32 / 64, 1, 1]);
            gpu.wait(&step.submit())?;
            gpu.download(&out)
        };
        let found = make().unwrap();
        for ([a, b, c, expected], found) in triples.iter().zip(found.as_chunks::<4>().0) {
            let found = f32::from_le_bytes(*found);
            assert_eq!(
                found.to_bits(),
                expected.to_bits(),
                "{a:e} * {b:e} + {c:e} = {expected:e}, {found:e}"
            );
        }
    }

    #[test]
    fn the_probe_fills_whole_workgroups() {
        assert!(super::probe_pairs().len().is_multiple_of(64));
    }
}

//! A kernel on its way: constants, functions and bindings put together by whoever needs them.

use std::fmt::Write as _;

use crate::quantise::{QUANTISE, source};
use crate::shader::{Access, Op, Shader};
use crate::{CodedPlane, Gpu, GpuError, Slice};

pub(crate) const FLOAT: &str = concat!(include_str!("wgsl/exp.wgsl"), include_str!("wgsl/norm_float.wgsl"));
const STORE_CODES: &str = include_str!("wgsl/norm_codes.wgsl");

/// A kernel's source, and the buffers that it will be bound to.
#[derive(Debug, Default)]
pub(crate) struct Draft<'a> {
    source: String,
    access: Vec<Access>,
    slices: Vec<&'a Slice>,
}

impl<'a> Draft<'a> {
    pub(crate) fn constant(mut self, name: &str, value: usize) -> Self {
        let _ = writeln!(self.source, "const {name}: u32 = {value}u;");
        self
    }

    pub(crate) fn flag(mut self, name: &str, value: bool) -> Self {
        let _ = writeln!(self.source, "const {name}: bool = {value};");
        self
    }

    /// Functions of floats, and int8 codes in groups of `group` that teams of `team` lanes share.
    pub(crate) fn float(self, group: usize, team: usize) -> Self {
        self.constant("GROUP", group).constant("TEAM", team).text(QUANTISE).text(FLOAT)
    }

    pub(crate) fn text(mut self, text: &str) -> Self {
        self.source.push_str(text);
        self
    }

    /// The next binding, an array of `ty`.
    pub(crate) fn buffer(mut self, name: &str, ty: &str, access: Access, slice: &'a Slice) -> Self {
        let mode = if access == Access::Read { "read" } else { "read_write" };
        let at = self.access.len();
        let _ = writeln!(self.source, "@group(0) @binding({at}) var<storage, {mode}> {name}: array<{ty}>;");
        self.access.push(access);
        self.slices.push(slice);
        self
    }

    /// The next binding, which a text declares.
    pub(crate) fn declared(mut self, access: Access, slice: &'a Slice) -> Self {
        self.access.push(access);
        self.slices.push(slice);
        self
    }

    /// The next binding, rows of `cols` floats: `load_NAME(row, chunk)` gives columns `4 * chunk` and the three
    /// after them, 0 past the end of the row, and `store_NAME` takes them. The chunk begins within the row.
    pub(crate) fn plane(self, name: &str, cols: usize, access: Access, slice: &'a Slice) -> Self {
        let wide = cols.is_multiple_of(4);
        let mut draft = self.buffer(name, if wide { "vec4<f32>" } else { "f32" }, access, slice);
        let out = &mut draft.source;
        let writes = access == Access::Write;
        if wide {
            let at = format!("{name}[row * {}u + chunk]", cols / 4);
            let _ = writeln!(out, "fn load_{name}(row: u32, chunk: u32) -> vec4<f32> {{ return {at}; }}");
            if writes {
                let _ = writeln!(out, "fn store_{name}(row: u32, chunk: u32, v: vec4<f32>) {{ {at} = v; }}");
            }
            return draft;
        }
        let place = format!("let at = row * {cols}u + 4u * chunk; let left = {cols}u - 4u * chunk;");
        let lines = |line: &dyn Fn(usize, char) -> String| -> String {
            let rest = [(1, 'y'), (2, 'z'), (3, 'w')];
            rest.iter().map(|&(i, part)| format!("if (left > {i}u) {{ {} }} ", line(i, part))).collect()
        };
        let loads = lines(&|i, part| format!("v.{part} = {name}[at + {i}u];"));
        let _ = writeln!(
            out,
            "fn load_{name}(row: u32, chunk: u32) -> vec4<f32> {{ {place} \
             var v = vec4({name}[at], 0.0, 0.0, 0.0); {loads}return v; }}"
        );
        if writes {
            let stores = lines(&|i, part| format!("{name}[at + {i}u] = v.{part};"));
            let _ = writeln!(
                out,
                "fn store_{name}(row: u32, chunk: u32, v: vec4<f32>) {{ {place} {name}[at] = v.x; {stores}}}"
            );
        }
        draft
    }

    /// Codes and cells of an int8 plane: the next two bindings.
    pub(crate) fn coded(self, plane: &'a CodedPlane) -> Self {
        self.buffer("codes", "u32", Access::Write, &plane.codes)
            .buffer("cells", "vec2<u32>", Access::Write, &plane.cells)
            .text(STORE_CODES)
    }

    /// The kernel, with the CPU's bits wherever its fma is.
    pub(crate) fn op(self, gpu: &Gpu, name: &str) -> Result<Op, GpuError> {
        let source = source(gpu, &[], &[&self.source])?;
        self.bound(gpu, name, source)
    }

    /// The same, but `rest` has the device's own `fma`, fused or not: for sums whose order is nobody else's.
    pub(crate) fn loose_op(self, gpu: &Gpu, name: &str, rest: &str) -> Result<Op, GpuError> {
        let source = source(gpu, &[], &[&self.source])? + rest;
        self.bound(gpu, name, source)
    }

    fn bound(self, gpu: &Gpu, name: &str, source: String) -> Result<Op, GpuError> {
        let shader = Shader { name, source: source.into(), bindings: &self.access };
        gpu.bind(&gpu.kernel(&shader)?, &self.slices)
    }
}

/// Panics if a buffer is shorter than its kernel takes for granted.
pub(crate) fn demand(slice: &Slice, words: usize, what: &str) {
    assert!(slice.len() >= 4 * words as u64, "{what}: {} bytes, {} are needed", slice.len(), 4 * words);
}

/// Panics if an int8 plane does not fit.
pub(crate) fn demand_coded(plane: &CodedPlane, tokens: usize, cols: usize) {
    assert!(
        plane.tokens >= tokens && plane.cols == cols,
        "int8 activations are [{}, {}], not [{tokens}, {cols}]",
        plane.tokens,
        plane.cols
    );
}

//! Products of routed experts.

use smoe_format::spec::Activation;
use smoe_format::{Encoding, LayerTable, TensorEntry};
use smoe_gpu::{Down, ExpertInput, ExpertLayout, GateUp, GpuError, Hidden, Slice, Step, WorkList};

use super::Bench;
use super::data::{tensor, uniform};

/// The experts of a model's layer.
pub(super) struct Experts {
    pub(super) name: &'static str,
    pub(super) d: usize,
    pub(super) ff: usize,
    /// Of a token.
    pub(super) top_k: usize,
    pub(super) encoding: Encoding,
    /// They have biases, and a clamped activation.
    pub(super) is_gpt_oss: bool,
}

/// Whose experts they are.
#[derive(Clone, Copy)]
pub(super) enum Of {
    /// The same of all tokens.
    All,
    /// Each token's own.
    Each,
    /// So many in all, each of as many tokens as the next.
    Many(usize),
}

impl Bench {
    pub(super) fn experts(&mut self, shape: &Experts, tokens: usize, of: Of) -> Result<(), GpuError> {
        let &Experts { name, d, ff, top_k, encoding, is_gpt_oss } = shape;
        let mut offset = 0;
        let tensors = [(ff, d), (ff, d), (d, ff)].map(|(rows, cols)| {
            let len = encoding.tensor_bytes(rows, cols).expect("a shape that fits");
            let entry = TensorEntry { encoding, rows, cols, offset, len };
            offset += len;
            entry
        });
        let record = offset.next_multiple_of(16 << 10);
        let experts = match of {
            Of::All => top_k,
            Of::Each => top_k * tokens,
            Of::Many(experts) => experts,
        };
        let lists = (self.cold as usize / record / experts).max(1);
        let table = LayerTable { layer: 0, n_experts: experts as u32, record_len: record, tensors };
        let mut layout = ExpertLayout::new(&table, record as u64);
        if is_gpt_oss {
            let biases = self.gpu.buffer("biases", (4 * experts * (2 * ff + d)) as u64)?;
            layout = layout.activated(Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 }).biased(biases);
        }
        let slots = self.slots(&tensors, record, lists * experts)?;
        let x = self.coded_x(tokens, d, uniform(encoding).group())?;
        let planes = [&x];
        let input = ExpertInput { coded: &planes, float: None };
        let pairs = tokens * top_k;
        let hidden = Hidden::new(&self.gpu, &layout, pairs)?;
        let y = self.gpu.buffer("y", (4 * pairs * d) as u64)?;
        let list = |l: usize| {
            let list = WorkList::new(&self.gpu, &layout, tokens, top_k)?;
            // Pairs take turns with the experts.
            let of = |e: usize| -> Vec<u32> { (e as u32..pairs as u32).step_by(experts).collect() };
            let all: Vec<(u32, u32, Vec<u32>)> =
                (0..experts).map(|e| ((l * experts + e) as u32, e as u32, of(e))).collect();
            let entries: Vec<_> = all.iter().map(|(slot, e, pairs)| (*slot, *e, &pairs[..])).collect();
            list.write(&self.gpu, tokens, &entries);
            Ok(list)
        };
        let lists = (0..lists).map(list).collect::<Result<Vec<_>, GpuError>>()?;
        let work = |matrices: u64| {
            let bytes = matrices * (experts * tensors[0].len) as u64;
            (bytes, (matrices as usize * pairs * ff * d) as f64)
        };
        let how = match (tokens, of) {
            (1, _) => format!("{top_k} experts"),
            (_, Of::All) => format!("{top_k} experts, shared"),
            _ => format!("{experts} experts"),
        };
        let gate_up = |list| GateUp::new(&self.gpu, &layout, &slots, list, &input, &hidden);
        let gate_ups = lists.iter().map(gate_up).collect::<Result<Vec<_>, _>>()?;
        let record = |step: &mut Step, i: usize| gate_ups[i % gate_ups.len()].record(step, tokens);
        self.product(&format!("{name} gate and up, {how}"), tokens, work(2), &record)?;
        let down = |list| Down::new(&self.gpu, &layout, &slots, list, &hidden, &y);
        let downs = lists.iter().map(down).collect::<Result<Vec<_>, _>>()?;
        let record = |step: &mut Step, i: usize| downs[i % downs.len()].record(step, tokens);
        self.product(&format!("{name} down, {how}"), tokens, work(1), &record)
    }

    /// Slots of one expert's weights, over and over.
    fn slots(&self, tensors: &[TensorEntry; 3], record: usize, count: usize) -> Result<Slice, GpuError> {
        let mut bytes = vec![0; record];
        for t in tensors {
            bytes[t.offset..t.offset + t.len].copy_from_slice(&tensor(t.encoding, t.rows, t.cols));
        }
        let slots = self.gpu.buffer("slots", (count * record) as u64)?;
        self.gpu.write(&slots, 0, &bytes);
        let record = record as u64;
        let mut done = 1;
        while done < count as u64 {
            let next = done.min(count as u64 - done);
            let from = self.gpu.buffer("some slots", next * record)?;
            let mut step = self.gpu.step();
            step.copy(&slots.part(0, next * record), &from);
            step.copy(&from, &slots.part(done * record, next * record));
            let submitted = step.submit();
            self.gpu.wait(&submitted)?;
            done += next;
        }
        Ok(slots)
    }
}

//! What becomes of the kernels on Metal: naga's translation, looked at for what makes them fast or slow there.
//!
//! Nothing of it runs here. Assertions about the text, not the text itself, which naga's releases change.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests fail loudly")]

mod common;

use naga::back::msl;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, ShaderStage};
use smoe_format::spec::{Activation, GroupScore, GroupSpec, MoeSpec, RouterKind};
use smoe_format::{Encoding, LayerTable, Table, TensorEntry, Uniform, Zero};
use smoe_gpu::{
    Angles, Argmax, Attention, AttentionGate, AttentionHeads, AttentionOutputs, AttentionScratch,
    CodedMatmul, CodedPlane, Columns, Delta, DeltaInput, DeltaLayout, DeltaNet, DeltaNetWeights,
    DeltaOutputs, DeltaScratch, Down, Embed, ExactMatmul, ExpertInput, ExpertLayout, ExpertsOf, FloatMatmul,
    GateUp, Gpu, GpuError, HeadColumns, HeadInput, HeadMatmul, HeadPlane, HeadTurn, Hidden, KV_BLOCK,
    KvFormat, KvLayout, Lanes, LatentAppend, LatentAttention, LatentEntry, LatentExit, LatentInput,
    LatentLayout, LatentNorm, LatentQueries, LatentRow, LoneExperts, MixNorm, NormOutputs, OwnMatmul,
    Projections, QkNorm, Quantise, RopeAppend, RopeInput, RopePairs, Route, RouteInputs, RouteOutputs, Rows,
    Shared, Slice, StateRuns, Tuning, Weights, WorkList,
};

/// A kernel in Metal's language.
struct Translated {
    text: String,
    /// Names of its variables in memory that a workgroup shares.
    shared: Vec<String>,
}

/// What `wgpu` hands to Metal; without `checks` as `Gpu::kernel` asks for it.
fn translate(source: &str, checks: bool) -> Result<Translated, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let capabilities =
        Capabilities::IMMEDIATES | Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .subgroup_stages(ShaderStages::COMPUTE)
        .subgroup_operations(SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|e| e.emit_to_string(source))?;
    let mut resources = msl::EntryPointResources {
        immediates_buffer: Some(20),
        sizes_buffer: Some(21),
        ..Default::default()
    };
    let mut shared = Vec::new();
    for (i, (_, variable)) in module.global_variables.iter().enumerate() {
        if let Some(binding) = variable.binding {
            let target = msl::BindTarget { buffer: Some(i as u8), mutable: true, ..Default::default() };
            resources.resources.insert(binding, target);
        }
        if variable.space == AddressSpace::WorkGroup {
            shared.extend(variable.name.clone());
        }
    }
    let policy = if checks { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: [("main".to_owned(), resources)].into(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            image_load: policy,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: checks,
        force_loop_bounding: checks,
        emit_int_div_checks: checks,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((ShaderStage::Compute, "main".to_owned())),
        ..Default::default()
    };
    let (text, translation) =
        msl::write_string(&module, &info, &options, &pipeline).map_err(|e| e.to_string())?;
    for name in translation.entry_point_names {
        name.map_err(|e| e.to_string())?;
    }
    Ok(Translated { text, shared })
}

impl Translated {
    /// The traces of checks in it.
    fn checks(&self) -> Vec<String> {
        let mut found: Vec<_> = ["loop_bound", "naga_div(", "naga_mod(", "metal::min(unsigned"]
            .into_iter()
            .filter(|trace| self.text.contains(trace))
            .map(str::to_owned)
            .collect();
        for line in self.text.lines().map(str::trim).filter(|line| line.ends_with("= {};")) {
            let assigned = |name: &&String| {
                line.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with([' ', '[', '.']))
            };
            found.extend(self.shared.iter().find(assigned).map(|_| line.to_owned()));
        }
        found
    }
}

/// What has a counterpart in Metal's language, and must arrive as that.
const COUNTERPARTS: [(&str, &str); 8] = [
    ("subgroupAdd(", "metal::simd_sum("),
    ("subgroupMax(", "metal::simd_max("),
    ("subgroupMin(", "metal::simd_min("),
    ("subgroupShuffle(", "metal::simd_shuffle("),
    ("subgroupShuffleXor(", "metal::simd_shuffle_xor("),
    ("fma(", "metal::fma("),
    ("workgroupBarrier()", "metal::threadgroup_barrier("),
    // A load of sixteen bytes is one load.
    ("array<vec4<u32>>", "typedef metal::uint4 "),
];

/// Makes every launcher, of shapes and encodings that stand for the others: then the device knows the sources.
fn launchers(gpu: &Gpu) -> Result<(), GpuError> {
    products(gpu)?;
    for [gate, up, down] in [
        [CODED[0], CODED[0], CODED[1]],
        [CODED[1], CODED[3], CODED[2]],
        [Encoding::Bf16, Encoding::Bf16, Encoding::F16],
        [Encoding::F32, CODED[0], CODED[0]],
    ] {
        experts(gpu, [gate, up, down])?;
    }
    layer(gpu)
}

/// All widths of codes, both kinds of zeros.
const CODED: [Encoding; 7] = [
    uniform(4, 64, Zero::Symmetric),
    uniform(4, 32, Zero::Affine),
    uniform(2, 128, Zero::Symmetric),
    uniform(3, 64, Zero::Affine),
    uniform(5, 64, Zero::Symmetric),
    uniform(6, 16, Zero::Symmetric),
    uniform(8, 64, Zero::Symmetric),
];
const FLOATS: [Encoding; 3] = [Encoding::Bf16, Encoding::F16, Encoding::F32];

const fn uniform(bits: u8, group: usize, zero: Zero) -> Encoding {
    match Uniform::new(bits, group, zero) {
        Some(uniform) => Encoding::Uniform(uniform),
        None => panic!("no such encoding"),
    }
}

fn floats(gpu: &Gpu, n: usize) -> Slice {
    gpu.buffer("test", 4 * n as u64).unwrap()
}

fn products(gpu: &Gpu) -> Result<(), GpuError> {
    let (rows, cols, tokens) = (96, 3072, 64);
    let (x, odd) = (floats(gpu, tokens * cols), cols - 5);
    let out = Columns::whole(floats(gpu, tokens * rows), rows);
    let matrix = |encoding: Encoding, cols: usize| {
        let bytes = encoding.tensor_bytes(rows, cols).unwrap() as u64;
        Weights::new(gpu.buffer("test", bytes).unwrap(), rows, cols, encoding)
    };
    for encoding in CODED {
        let Encoding::Uniform(uniform) = encoding else { unreachable!() };
        // Long rows and short ones are cut in other ways.
        for cols in if uniform.bits() == 4 { &[3072, 192][..] } else { &[3072] } {
            let cols = *cols;
            let coded = CodedPlane::new(gpu, tokens, cols, uniform.group())?;
            Quantise::new(gpu, &x, &coded)?;
            CodedMatmul::new(gpu, &matrix(encoding, cols), &coded, &out)?;
            let tuning = Some(Tuning { threads: 128, lanes: Lanes::Wide(2) });
            CodedMatmul::tuned(gpu, &matrix(encoding, cols), &coded, &out, tuning)?;
        }
        ExactMatmul::new(gpu, &matrix(encoding, cols), &x, tokens, &out)?;
    }
    for table in [Table::MXFP4, Table::IQ4_NL] {
        let coded = CodedPlane::new(gpu, tokens, cols, table.group())?;
        let tuning = Some(Tuning { threads: 128, lanes: Lanes::Wide(2) });
        for tuning in [None, tuning] {
            CodedMatmul::tuned(gpu, &matrix(table.into(), cols), &coded, &out, tuning)?;
        }
    }
    for encoding in FLOATS {
        for cols in [cols, odd] {
            FloatMatmul::new(gpu, &matrix(encoding, cols), &x, tokens, &out)?;
        }
    }
    Ok(())
}

fn experts(gpu: &Gpu, encodings: [Encoding; 3]) -> Result<(), GpuError> {
    // So many that experts share tiles too.
    let (d, ff, tokens, top_k) = (256, 128, 64, 4);
    let mut at = 0;
    let tensors = [0, 1, 2].map(|i| {
        let (rows, cols) = if i < 2 { (ff, d) } else { (d, ff) };
        let (encoding, offset) = (encodings[i], at);
        let len = encoding.tensor_bytes(rows, cols).unwrap();
        at = (offset + len).next_multiple_of(64);
        TensorEntry { encoding, rows, cols, offset, len }
    });
    let table = LayerTable { layer: 0, n_experts: 16, record_len: at, tensors };
    let plain = ExpertLayout::new(&table, at as u64);
    let slots = gpu.buffer("slots", 16 * at as u64)?;
    let list = WorkList::new(gpu, &plain, tokens, top_k)?;
    let planes: Vec<CodedPlane> = [16, 32, 64, 128]
        .into_iter()
        .map(|group| CodedPlane::new(gpu, tokens, d, group))
        .collect::<Result<_, _>>()?;
    let (coded, float): (Vec<_>, _) = (planes.iter().collect(), floats(gpu, tokens * d));
    let input = ExpertInput { coded: &coded, float: Some(&float) };
    let hidden = Hidden::new(gpu, &plain, list.most_pairs())?;
    let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    let biased = plain.clone().activated(clamped).biased(floats(gpu, 16 * (2 * ff + d)));
    for layout in [&plain, &biased] {
        GateUp::new(gpu, layout, &slots, &list, &input, &hidden)?;
        Down::new(gpu, layout, &slots, &list, &hidden, &floats(gpu, list.most_pairs() * d))?;
    }
    // With a shared one beside them, and its gate.
    let (one, own, y) = (WorkList::new(gpu, &plain, 1, 1)?, Hidden::new(gpu, &plain, 1)?, floats(gpu, d));
    let outputs = floats(gpu, list.most_pairs() * d);
    let routed = ExpertsOf { layout: &biased, slots: &slots, list: &list, hidden: &hidden, y: &outputs };
    let shared = ExpertsOf { layout: &plain, slots: &slots, list: &one, hidden: &own, y: &y };
    let gate = Weights::new(floats(gpu, d), 1, d, Encoding::F32);
    let out = Columns::whole(floats(gpu, 1), 1);
    LoneExperts::new(gpu, routed, shared, &input, Some((&gate, &float, &out)))?;
    Ok(())
}

fn layer(gpu: &Gpu) -> Result<(), GpuError> {
    let (tokens, d, top_k, n_heads, n_kv_heads, dim, context) = (16, 256, 4, 8, 2, 64, 1024);
    let (hidden, plane, weight) = (floats(gpu, tokens * d), floats(gpu, tokens * d), floats(gpu, d));
    let (pairs, weights, ids) =
        (floats(gpu, tokens * top_k * d), floats(gpu, tokens * top_k), floats(gpu, tokens));
    let gate = Some(&ids);
    let coded = CodedPlane::new(gpu, tokens, d, 64)?;
    let shared = |gate| Some(Shared { output: &plane, gate });
    let of_experts = |shared| Delta::Experts { outputs: &pairs, weights: &weights, top_k, shared };
    for delta in [
        Delta::None,
        Delta::Plane(&plane, None),
        Delta::Plane(&plane, Some(&weight)),
        of_experts(None),
        of_experts(shared(None)),
        of_experts(shared(gate)),
    ] {
        let out = floats(gpu, tokens * d);
        let outputs = NormOutputs { plane: None, coded: &[&coded] };
        MixNorm::new(gpu, tokens, d, 1e-6, &hidden, &weight, delta, None, outputs)?;
        let outputs = NormOutputs { plane: Some(&out), coded: &[] };
        MixNorm::new(gpu, tokens, d, 1e-6, &hidden, &weight, delta, Some((&ids, 1)), outputs)?;
    }
    for encoding in CODED.into_iter().chain(FLOATS) {
        let table = gpu.buffer("test", encoding.tensor_bytes(96, d).unwrap() as u64)?;
        Embed::new(gpu, tokens, &table, encoding, 96, d, &ids, &hidden)?;
    }

    let stride = (n_heads + 2 * n_kv_heads) * dim;
    let at = [0, n_heads * dim, (n_heads + n_kv_heads) * dim];
    let (projected, bias) = (floats(gpu, tokens * stride), floats(gpu, stride));
    let (angles, norms) = (floats(gpu, context * dim), floats(gpu, stride));
    let (rows, tables) = (floats(gpu, 4 * tokens), floats(gpu, context / KV_BLOCK));
    let rows = Rows { rows: &rows, tables: &tables };
    let (queries, mixed) = (floats(gpu, tokens * n_heads * dim), floats(gpu, tokens * n_heads * dim));
    let mixed_coded = CodedPlane::new(gpu, tokens, n_heads * dim, 64)?;
    let sinks = floats(gpu, n_heads);
    let scratch = AttentionScratch::new(gpu, n_heads, dim, context, 1 << 20)?;
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
        let kv = KvLayout { format, n_kv_heads, head_dim: dim, value_dim: dim };
        let cache = gpu.buffer("cache", (kv.block_bytes() * (context / KV_BLOCK)) as u64)?;
        for (pairs, dim, whole, bias) in
            [(RopePairs::Halves, dim, false, None), (RopePairs::Neighbours, dim / 2, true, Some(&bias))]
        {
            let projections = Projections { plane: &projected, stride, at, bias };
            let norm = Some(QkNorm { weights: &norms, eps: 1e-6, whole });
            let angles = Angles { table: &angles, positions: context, dim, pairs };
            for norm in [norm, None] {
                let input = RopeInput { projections, norm, angles };
                RopeAppend::new(gpu, tokens, n_heads, kv, input, rows, &queries, &cache)?;
            }
            let gate = Some(AttentionGate { plane: &projected, stride, at: 0 });
            for (sinks, coded, gate) in [(None, None, gate), (Some(&sinks), Some(&mixed_coded), None)] {
                let heads = AttentionHeads { n_heads, scale: 0.125, sinks };
                let outputs = AttentionOutputs { plane: coded.is_none().then_some(&mixed), coded, gate };
                let turns = Some(RopeInput { projections, norm, angles });
                Attention::new(gpu, tokens, kv, heads, &queries, &cache, rows, &scratch, outputs, turns)?;
            }
        }
    }
    latent(gpu)?;
    delta_nets(gpu)?;

    let n_experts = 64;
    let layout = {
        let (encoding, offset) = (Encoding::F32, 0);
        let entry = TensorEntry { encoding, rows: 16, cols: 16, offset, len: 1024 };
        let table = LayerTable { layer: 0, n_experts: 64, record_len: 1024, tensors: [entry; 3] };
        ExpertLayout::new(&table, 1024)
    };
    let list = WorkList::new(gpu, &layout, tokens, top_k)?;
    let (logits, slots, bias) =
        (floats(gpu, tokens * n_experts), floats(gpu, n_experts), floats(gpu, n_experts));
    let chosen = floats(gpu, tokens * top_k);
    let moe = MoeSpec { n_experts, top_k, d_expert: 16, norm_topk: true, ..MoeSpec::default() };
    let groups = Some(GroupSpec { n: 8, top: 3, score: GroupScore::BestTwo });
    for (moe, bias) in [
        (moe, None),
        (MoeSpec { router: RouterKind::Sigmoid, groups, routed_scale: 2.5, ..moe }, Some(&bias)),
    ] {
        let matrix = Weights::new(floats(gpu, n_experts * 64), n_experts, 64, Encoding::Bf16);
        let x = floats(gpu, tokens * 64);
        let router = Some((&matrix, &x));
        let inputs =
            RouteInputs { logits: &logits, bias, correction: bias, router, norm: None, slots: &slots };
        let outputs = RouteOutputs { ids: &chosen, weights: &weights, list: &list, seen: None };
        Route::new(gpu, tokens, &moe, inputs, outputs)?;
    }
    Argmax::new(gpu, tokens, n_experts, &logits, &ids)?;
    Ok(())
}

/// Gated delta nets, of keys whose rows fill lanes and of ones that do not.
fn delta_nets(gpu: &Gpu) -> Result<(), GpuError> {
    let tokens = 8;
    for (key_dim, value_dim) in [(128, 128), (48, 16)] {
        let layout = DeltaLayout { n_key_heads: 2, n_value_heads: 4, key_dim, value_dim, conv_width: 4 };
        let (keys, values) = (2 * key_dim, 4 * value_dim);
        let at = [0, keys, 2 * keys, 2 * keys + values, 2 * (keys + values), 2 * (keys + values) + 4];
        let plane = floats(gpu, tokens * (at[5] + 4));
        let (taps, rates) = (floats(gpu, 4 * (2 * keys + values)), floats(gpu, 8));
        let (norm, states) = (floats(gpu, value_dim), floats(gpu, 2 * layout.state_len()));
        let runs = StateRuns::new(gpu, tokens, 2, 2)?;
        let scratch = DeltaScratch::new(gpu, &layout, tokens)?;
        let (out, coded) = (floats(gpu, tokens * values), CodedPlane::new(gpu, tokens, values, 64)?);
        for outputs in [
            DeltaOutputs { plane: Some(&out), coded: None },
            DeltaOutputs { plane: None, coded: Some(&coded) },
        ] {
            let input = DeltaInput { plane: &plane, stride: at[5] + 4, at };
            let weights = DeltaNetWeights { taps: &taps, rates: &rates, norm: &norm, eps: 1e-6 };
            DeltaNet::new(gpu, tokens, layout, input, weights, &runs, &states, &scratch, outputs)?;
        }
    }
    Ok(())
}

/// Latent attention, and what goes into it.
fn latent(gpu: &Gpu) -> Result<(), GpuError> {
    let (tokens, heads, context) = (8, 16, 1024);
    let rows = Rows { rows: &floats(gpu, 4 * tokens), tables: &floats(gpu, context / KV_BLOCK) };
    // As published, and a row whose pieces are not all there.
    for (i, (kv_rank, rope_dim, nope, q_rank)) in
        [(512, 64, 128, 1536), (64, 12, 28, 48)].into_iter().enumerate()
    {
        let key_dim = kv_rank + rope_dim;
        let stride = q_rank + key_dim;
        let (plane, norms) = (floats(gpu, tokens * stride), floats(gpu, kv_rank + q_rank));
        let table = floats(gpu, context * rope_dim);
        let pairs = [RopePairs::Neighbours, RopePairs::Halves][i];
        let angles = Angles { table: &table, positions: context, dim: rope_dim, pairs };
        let (low, low_coded) = (floats(gpu, tokens * q_rank), CodedPlane::new(gpu, tokens, q_rank, 64)?);
        let (queries, latents) =
            (floats(gpu, tokens * heads * key_dim), floats(gpu, tokens * heads * kv_rank));
        let scratch = AttentionScratch::new(gpu, heads, kv_rank, context, 1 << 20)?;
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8] {
            let kv = LatentLayout { format, kv_rank, rope_dim };
            let cache = gpu.buffer("cache", (kv.block_bytes() * (context / KV_BLOCK)) as u64)?;
            for (plane_out, coded) in [(Some(&low), None), (None, Some(&low_coded))] {
                let queries = Some(LatentQueries { rank: q_rank, at: 0, plane: plane_out, coded });
                let norm = LatentNorm { weights: &norms, eps: 1e-6 };
                let input = LatentInput { plane: &plane, stride, kv_at: q_rank, queries, norm, angles };
                LatentAppend::new(gpu, tokens, kv, input, rows, &cache)?;
            }
            let outputs = AttentionOutputs { plane: Some(&latents), ..Default::default() };
            LatentAttention::new(gpu, tokens, kv, heads, 0.1, &queries, &cache, rows, &scratch, outputs)?;
        }
        let from = floats(gpu, tokens * heads * (nope + rope_dim));
        let from = HeadColumns {
            plane: &from,
            stride: heads * (nope + rope_dim),
            at: 0,
            head_stride: nope + rope_dim,
        };
        for (encoding, group) in
            [(CODED[0], Some(64)), (CODED[6], Some(64)), (CODED[6], None), (Encoding::Bf16, None)]
        {
            let part = HeadPlane::new(gpu, tokens, heads, nope, group)?;
            let turn = HeadTurn { angles, rows, queries: &queries, key_dim };
            HeadInput::new(gpu, tokens, heads, nope, from, Some(turn), &part)?;
            let matrix = |rows: usize, cols: usize| -> Result<Weights, GpuError> {
                let bytes = encoding.tensor_bytes(rows, cols).unwrap() as u64;
                Ok(Weights::new(gpu.buffer("test", bytes)?, rows, cols, encoding))
            };
            let weights = matrix(heads * kv_rank, nope)?;
            HeadMatmul::new(gpu, &weights, heads, &part, tokens, &queries, key_dim)?;
            if group.is_some() {
                let kv = LatentLayout { format: KvFormat::Q8, kv_rank, rope_dim };
                let cache = gpu.buffer("cache", kv.block_bytes() as u64)?;
                let row_at = from.stride - key_dim;
                let norm = LatentNorm { weights: &norms, eps: 1e-6 };
                let (plane, stride) = (from.plane, from.stride);
                let input = LatentInput { plane, stride, kv_at: row_at, queries: None, norm, angles };
                LatentEntry::new(
                    gpu,
                    &weights,
                    heads,
                    from,
                    turn,
                    Some(LatentRow { kv, input, cache: &cache }),
                )?;
                let (out, matrix) = (floats(gpu, heads * 64), matrix(heads * 64, kv_rank)?);
                LatentExit::new(gpu, &matrix, heads, &scratch, rows, &out, 64)?;
                OwnMatmul::new(gpu, &matrix, &queries, &Columns::whole(out, heads * 64))?;
            }
        }
    }
    Ok(())
}

/// A source as a device gets it whose multiply-adds are fused, which Metal's are.
fn fused(source: &str) -> String {
    const PLAYED: &str = include_str!("../src/wgsl/quantise_fma_played.wgsl");
    // Devices with wide subgroups exchange by them.
    let source = source.replace(
        include_str!("../src/wgsl/coded_wide_played.wgsl"),
        include_str!("../src/wgsl/coded_wide_exchange.wgsl"),
    );
    match source.strip_suffix(PLAYED) {
        Some(rest) => rest.replace("fma1(", "fma(") + include_str!("../src/wgsl/quantise_fma.wgsl"),
        None => source,
    }
}

#[test]
fn every_kernel_is_valid_and_free_of_checks() {
    let Some(gpu) = common::gpu() else { return };
    launchers(&gpu).unwrap();
    let sources = gpu.sources();
    assert!(!sources.is_empty());
    for (name, source) in &sources {
        let source = &fused(source);
        let translated = translate(source, false).unwrap_or_else(|why| panic!("{name}: {why}"));
        let text = &translated.text;
        assert!(text.contains("kernel void"), "{name}:\n{text}");
        for (ours, theirs) in COUNTERPARTS {
            assert!(!source.contains(ours) || text.contains(theirs), "{name}: no {theirs} in\n{text}");
        }
        assert!(!text.contains("packed_uint4"), "{name}: loads of sixteen bytes are cut up in\n{text}");
        let checks = translated.checks();
        assert!(checks.is_empty(), "{name}: {checks:?} in\n{text}");
    }
}

#[test]
fn checks_would_be_seen() {
    let source = "
        var<workgroup> part: array<f32, 64>;
        @group(0) @binding(0) var<storage, read_write> out: array<f32>;
        @compute @workgroup_size(64)
        fn main(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3<u32>) {
            part[lane] = out[group.x / (lane + 1u)];
            workgroupBarrier();
            var sum = 0.0;
            for (var i = 0u; i < 64u; i++) {
                sum += part[i];
            }
            out[lane] = sum;
        }";
    let checks = translate(source, true).unwrap().checks();
    for trace in ["loop_bound", "naga_div(", "metal::min(unsigned", "part = {};"] {
        assert!(checks.iter().any(|check| check == trace), "{trace}: {checks:?}");
    }
    assert_eq!(translate(source, false).unwrap().checks(), Vec::<String>::new());
}

#[test]
fn what_is_wrong_is_refused() {
    let body = |line: &str| {
        format!(
            "@group(0) @binding(0) var<storage, read_write> out: array<u32>;
                 @compute @workgroup_size(64)
                 fn main(@builtin(local_invocation_index) lane: u32) {{ {line} }}"
        )
    };
    assert!(translate(&body("out[lane] = subgroupAdd(lane);"), false).is_ok());
    for wrong in ["out[lane] = subgrupAdd(lane);", "out[lane] = 1.0;", "out[lane] = row;"] {
        assert!(translate(&body(wrong), false).is_err(), "{wrong}");
    }
}

//! `smoe selftest`: a device's kernels against the processor's, and a whole model on both.

use crate::args::SelftestArgs;
use crate::failure::Failure;

/// Without GPUs in this build there is nothing to test.
#[cfg(not(feature = "gpu"))]
pub fn selftest(_args: &SelftestArgs) -> Result<(), Failure> {
    Err(Failure::Usage("this build has no GPU support".to_owned()))
}

#[cfg(feature = "gpu")]
pub use with_gpu::selftest;

#[cfg(feature = "gpu")]
mod with_gpu {
    use std::time::Instant;

    use serde_json::{Value, json};
    use smoe_engine::{
        Control, DeviceChoice, Engine, EngineOptions, Observer, Sampler, Sampling, Session, Vault,
    };
    use smoe_format::spec::RouterKind;
    use smoe_format::{Encoding, Table, Uniform, Zero};
    use smoe_gpu::{CodedMatmul, CodedPlane, Columns, FloatMatmul, Gpu, Quantise, Slice, Software, Weights};
    use smoe_kernels::{Activations, Input, Kernels, Matrix, Pool, matmul};

    use super::{Failure, SelftestArgs};
    use crate::model;

    /// Largest difference of a whole model's float32 results, as a part of the largest logit: sums in another
    /// order, and int8 activations that round to another code.
    const TOLERANCE: f32 = 0.05;
    /// Largest difference of a product of floats, as a part of the largest.
    const SUMS: f32 = 1e-5;

    struct Check {
        name: String,
        result: Result<String, String>,
        seconds: f64,
    }

    /// Runs the command.
    pub fn selftest(args: &SelftestArgs) -> Result<(), Failure> {
        let (name, software) = match &args.device {
            DeviceChoice::Cpu => {
                return Err(Failure::Usage("the processor is what a device is tested against".to_owned()));
            }
            DeviceChoice::Auto => (None, Software::Refuse),
            DeviceChoice::Gpu(name) => (name.clone(), Software::Accept),
            DeviceChoice::Cuda => return through_cuda(args),
        };
        let gpu = Gpu::open(name.as_deref(), software).map_err(|e| Failure::new(e.to_string()))?;
        let facts = gpu.facts().clone();
        let fused = gpu.fused_fma().map_err(|e| Failure::new(e.to_string()))?;
        if !args.json {
            say!("smoe {} on {facts}", env!("CARGO_PKG_VERSION"));
            say!(
                "subgroups of {} to {}, fused multiply-add: {}",
                facts.subgroup.0,
                facts.subgroup.1,
                yes(fused)
            );
        }
        let mut checks = Vec::new();
        let mut check = |name: &str, run: &mut dyn FnMut() -> Result<String, String>| {
            checks.push(Check::run(args, name, run)?);
            Ok::<_, Failure>(())
        };
        check("int8 activations", &mut || quantise(&gpu))?;
        for bits in [2, 3, 4, 5, 6, 8] {
            for zero in [Zero::Symmetric, Zero::Affine] {
                let Some(uniform) = Uniform::new(bits, 64, zero) else { continue };
                let name = format!("product of {} codes", Encoding::from(uniform));
                check(&name, &mut || coded(&gpu, uniform.into()))?;
            }
        }
        for table in [Table::MXFP4, Table::IQ4_NL] {
            check(&format!("product of {table} codes"), &mut || coded(&gpu, table.into()))?;
        }
        for encoding in [Encoding::Bf16, Encoding::F16, Encoding::F32] {
            check(&format!("product of {encoding}"), &mut || float(&gpu, encoding))?;
        }
        drop(gpu);
        let device = DeviceChoice::Gpu(Some(facts.name.clone()));
        let vault = model::open_vault(&args.vault)?;
        check("a model's layers", &mut || layers(&vault, &device))?;
        check("a model's logits, token by token", &mut || logits(&vault, &device))?;
        check("a model's greedy tokens", &mut || tokens(&vault, &device))?;

        let about = json!({"device": facts.name, "driver": facts.driver, "fused": fused});
        conclude(args, &facts.to_string(), about, &checks)
    }

    /// A model through CUDA: its kernels are a whole token's.
    #[cfg(feature = "cuda")]
    fn through_cuda(args: &SelftestArgs) -> Result<(), Failure> {
        let facts =
            smoe_cuda::Cuda::open().map_err(|e| Failure::new(e.to_string())).map(|c| c.facts().clone())?;
        if !args.json {
            say!("smoe {} on {facts}", env!("CARGO_PKG_VERSION"));
        }
        let (vault, device) = (model::open_vault(&args.vault)?, DeviceChoice::Cuda);
        let checks = [
            Check::run(args, "a model's logits, token by token", &mut || logits(&vault, &device))?,
            Check::run(args, "a model's greedy tokens", &mut || tokens(&vault, &device))?,
        ];
        conclude(args, &facts.to_string(), json!({"device": facts.name, "driver": "cuda"}), &checks)
    }

    /// There is no CUDA in this build.
    #[cfg(not(feature = "cuda"))]
    fn through_cuda(_args: &SelftestArgs) -> Result<(), Failure> {
        Err(Failure::Usage("this build has no CUDA support".to_owned()))
    }

    impl Check {
        /// Runs a check and tells of it.
        fn run(
            args: &SelftestArgs,
            name: &str,
            run: &mut dyn FnMut() -> Result<String, String>,
        ) -> Result<Self, Failure> {
            let start = Instant::now();
            let result = run();
            let check = Self { name: name.to_owned(), result, seconds: start.elapsed().as_secs_f64() };
            if !args.json {
                let (word, what) = match &check.result {
                    Ok(what) => ("ok    ", what),
                    Err(what) => ("FAILED", what),
                };
                say!("{word} {name:<34} {:>6.2} s  {what}", check.seconds);
            }
            Ok(check)
        }
    }

    /// Tells what came of the checks.
    fn conclude(
        args: &SelftestArgs,
        device: &str,
        mut about: Value,
        checks: &[Check],
    ) -> Result<(), Failure> {
        let failed = checks.iter().filter(|check| check.result.is_err()).count();
        if args.json {
            let list: Vec<Value> = checks
                .iter()
                .map(|check| {
                    let (Ok(what) | Err(what)) = &check.result;
                    json!({"check": check.name, "ok": check.result.is_ok(), "what": what, "s": check.seconds})
                })
                .collect();
            about["checks"] = list.into();
            say!("{}", serde_json::to_string_pretty(&about)?);
        } else {
            say!("{} checks, {failed} failed", checks.len());
        }
        if failed > 0 { Err(Failure::new(format!("{failed} checks failed on {device}"))) } else { Ok(()) }
    }

    const fn yes(is: bool) -> &'static str {
        if is { "yes" } else { "no" }
    }

    /// Values from -1 to 1.
    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn upload(gpu: &Gpu, bytes: &[u8]) -> Result<Slice, String> {
        let slice = gpu.buffer("a test", bytes.len() as u64).map_err(|e| e.to_string())?;
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(4), 0);
        gpu.write(&slice, 0, &padded);
        Ok(slice)
    }

    fn floats(gpu: &Gpu, slice: &Slice) -> Result<Vec<f32>, String> {
        let bytes = gpu.download(slice).map_err(|e| e.to_string())?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    /// The two agree: in every bit if the device can, else within `tolerance` of the largest.
    fn compare(got: &[f32], expected: &[f32], exact: bool, tolerance: f32) -> Result<String, String> {
        if got.len() != expected.len() {
            return Err(format!("{} values for {}", got.len(), expected.len()));
        }
        if exact {
            let wrong = got.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            return if wrong == 0 {
                Ok(format!("{} values, the processor's bits", got.len()))
            } else {
                Err(format!("{wrong} of {} values differ", got.len()))
            };
        }
        let (worst, largest) = distance(got, expected);
        let what = format!("off by {worst:.2e} of {largest:.2e}");
        if worst <= tolerance * largest { Ok(what) } else { Err(what) }
    }

    /// The largest difference, infinite if one is no number, and the largest that is expected.
    fn distance(got: &[f32], expected: &[f32]) -> (f32, f32) {
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        let worst = got.iter().zip(expected).fold(0f32, |m, (a, b)| {
            let difference = (a - b).abs();
            if difference.is_nan() { f32::INFINITY } else { m.max(difference) }
        });
        (worst, largest)
    }

    const TOKENS: usize = 3;
    const ROWS: usize = 100;
    const COLS: usize = 712;

    fn quantise(gpu: &Gpu) -> Result<String, String> {
        let x = values(TOKENS * COLS, 1);
        let mut expected = Activations::with_capacity(TOKENS, COLS);
        expected.quantise(Kernels::detect(), &x, TOKENS, COLS, 64);
        let plane = CodedPlane::new(gpu, TOKENS, COLS, 64).map_err(|e| e.to_string())?;
        let op = Quantise::new(gpu, &upload(gpu, &bytes(&x))?, &plane).map_err(|e| e.to_string())?;
        let mut step = gpu.step();
        op.record(&mut step, TOKENS);
        gpu.wait(&step.submit()).map_err(|e| e.to_string())?;
        let codes = gpu.download(&plane.codes).map_err(|e| e.to_string())?;
        let view = expected.view();
        let mut wrong = 0;
        for token in 0..TOKENS {
            for g in 0..plane.groups() {
                let start = (token * plane.groups() + g) * 64;
                let own = view.cell(token, g).0;
                wrong += own.iter().zip(&codes[start..start + 64]).filter(|(a, b)| **a as u8 != **b).count();
            }
        }
        if wrong == 0 { Ok("the processor's codes".to_owned()) } else { Err(format!("{wrong} codes differ")) }
    }

    fn coded(gpu: &Gpu, encoding: Encoding) -> Result<String, String> {
        let group = encoding.tiles().map_or(0, Uniform::group);
        let (w, x) = (values(ROWS * COLS, 2), values(TOKENS * COLS, 3));
        let mut weights = vec![0; encoding.tensor_bytes(ROWS, COLS).unwrap_or(0)];
        encoding.encode(&w, COLS, &mut weights);
        let kernels = Kernels::detect();
        let mut activations = Activations::with_capacity(TOKENS, COLS);
        activations.quantise(kernels, &x, TOKENS, COLS, group);
        let matrix = Matrix::new(&weights, ROWS, COLS, encoding);
        let mut expected = vec![0.0; TOKENS * ROWS];
        let coded = [activations.view()];
        matmul(&Pool::new(1, false), kernels, &matrix, &Input::new(&x, TOKENS, &coded), &mut expected);

        let made = || -> Result<_, smoe_gpu::GpuError> {
            let plane = CodedPlane::new(gpu, TOKENS, COLS, group)?;
            let out = gpu.buffer("a test", (4 * TOKENS * ROWS) as u64)?;
            Ok((plane, out))
        };
        let (plane, out) = made().map_err(|e| e.to_string())?;
        let input = upload(gpu, &bytes(&x))?;
        let stored = Weights::new(upload(gpu, &weights)?, ROWS, COLS, encoding);
        let ops = || -> Result<_, smoe_gpu::GpuError> {
            let columns = Columns::whole(out.clone(), ROWS);
            Ok((Quantise::new(gpu, &input, &plane)?, CodedMatmul::new(gpu, &stored, &plane, &columns)?))
        };
        let (quantise, product) = ops().map_err(|e| e.to_string())?;
        let mut step = gpu.step();
        quantise.record(&mut step, TOKENS);
        product.record(&mut step, TOKENS);
        gpu.wait(&step.submit()).map_err(|e| e.to_string())?;
        let fused = gpu.fused_fma().map_err(|e| e.to_string())?;
        compare(&floats(gpu, &out)?, &expected, fused, SUMS)
    }

    fn float(gpu: &Gpu, encoding: Encoding) -> Result<String, String> {
        let (w, x) = (values(ROWS * COLS, 4), values(TOKENS * COLS, 5));
        let mut weights = vec![0; encoding.tensor_bytes(ROWS, COLS).unwrap_or(0)];
        encoding.encode(&w, COLS, &mut weights);
        let matrix = Matrix::new(&weights, ROWS, COLS, encoding);
        let mut expected = vec![0.0; TOKENS * ROWS];
        let input = Input::exact(&x, TOKENS);
        matmul(&Pool::new(1, false), Kernels::detect(), &matrix, &input, &mut expected);
        let out = gpu.buffer("a test", (4 * TOKENS * ROWS) as u64).map_err(|e| e.to_string())?;
        let stored = Weights::new(upload(gpu, &weights)?, ROWS, COLS, encoding);
        let columns = Columns::whole(out.clone(), ROWS);
        let product = FloatMatmul::new(gpu, &stored, &upload(gpu, &bytes(&x))?, TOKENS, &columns)
            .map_err(|e| e.to_string())?;
        let mut step = gpu.step();
        product.record(&mut step, TOKENS);
        gpu.wait(&step.submit()).map_err(|e| e.to_string())?;
        compare(&floats(gpu, &out)?, &expected, false, SUMS)
    }

    /// Everything that a forward shows.
    #[derive(Default)]
    struct Seen {
        hidden: Vec<f32>,
        router: Vec<f32>,
        logits: Vec<f32>,
    }

    impl Observer for Seen {
        fn hidden(&mut self, _index: usize, _first: usize, rows: &[f32]) {
            self.hidden.extend_from_slice(rows);
        }

        fn router(&mut self, _index: usize, _first: usize, rows: &[f32]) {
            self.router.extend_from_slice(rows);
        }

        fn logits(&mut self, _first: usize, rows: &[f32]) {
            self.logits.extend_from_slice(rows);
        }
    }

    fn open(vault: &Vault, device: &DeviceChoice) -> Result<Engine, String> {
        let mut options = EngineOptions { device: device.clone(), ..EngineOptions::default() };
        options.plan.context = Some(256.min(vault.spec.max_context));
        let mut engine = Engine::open(vault, &options).map_err(|e| e.to_string())?;
        engine.preload(&mut |_, _| {}).map_err(|e| e.to_string())?;
        Ok(engine)
    }

    fn prompt(vault: &Vault) -> Vec<u32> {
        (0..24u32).map(|i| (i * 7919 + 11) % vault.spec.vocab_size as u32).collect()
    }

    fn layers(vault: &Vault, device: &DeviceChoice) -> Result<String, String> {
        let run = |device: &DeviceChoice| {
            let mut seen = Seen::default();
            open(vault, device)?.observe(&prompt(vault), &mut seen).map_err(|e| e.to_string())?;
            Ok::<_, String>(seen)
        };
        let (got, expected) = (run(device)?, run(&DeviceChoice::Cpu)?);
        compare(&got.hidden, &expected.hidden, false, TOLERANCE).map_err(|e| format!("hidden states {e}"))?;
        compare(&got.router, &expected.router, false, TOLERANCE).map_err(|e| format!("router logits {e}"))?;
        compare(&got.logits, &expected.logits, false, TOLERANCE).map(|what| format!("logits {what}"))
    }

    /// Positions that are decoded one by one: across the runs of 128 that attention takes.
    const DECODED: usize = 130;

    /// What a device made of a prompt and of some tokens after it, one by one.
    struct Decoded {
        /// `[DECODED, vocab_size]`.
        logits: Vec<f32>,
        /// Of each token after the prompt, and of each MoE layer: the experts, ascending.
        routes: Vec<Vec<u16>>,
    }

    fn decode(vault: &Vault, device: &DeviceChoice, tokens: &[u32]) -> Result<Decoded, String> {
        let text = |e: smoe_engine::EngineError| e.to_string();
        let (mut engine, mut logits) = (open(vault, device)?, Vec::new());
        let mut session: Session = engine.open_session().map_err(text)?;
        let control = &mut Control::default();
        let (prompt, rest) = tokens.split_at(tokens.len() - DECODED);
        engine.sync(&mut session, prompt, control).map_err(text)?;
        engine.record_trace(true).map_err(text)?;
        for &token in rest {
            engine.decode(&mut session, token, control).map_err(text)?;
            logits.extend_from_slice(session.logits());
        }
        let trace = engine.record_trace(false).map_err(text)?.ok_or("no routes were written down")?;
        let mut routes = Vec::new();
        for (n, ids) in trace.steps() {
            if n != 1 {
                return Err(format!("a step of {n} tokens where one was decoded"));
            }
            for ids in ids.chunks_exact(trace.top_k()) {
                let mut ids = ids.to_vec();
                ids.sort_unstable();
                if !ids.is_sorted_by(|a, b| a < b) {
                    return Err(format!("experts {ids:?} of a token are not {} different ones", ids.len()));
                }
                routes.push(ids);
            }
        }
        Ok(Decoded { logits, routes })
    }

    /// Router logits of a prompt, layer by layer: `[MoE layer][tokens, n_experts]`.
    struct Routers(Vec<Vec<f32>>);

    impl Observer for Routers {
        fn hidden(&mut self, _index: usize, _first: usize, _rows: &[f32]) {}

        fn logits(&mut self, _first: usize, _rows: &[f32]) {}

        fn router(&mut self, index: usize, _first: usize, rows: &[f32]) {
            self.0[index].extend_from_slice(rows);
        }
    }

    /// Logits after each of some tokens, decoded one by one, the same ones for both.
    fn logits(vault: &Vault, device: &DeviceChoice) -> Result<String, String> {
        let moe = &vault.spec.moe;
        if moe.router != RouterKind::Softmax || moe.groups.is_some() || moe.router_bias || moe.correction_bias
        {
            return Ok("left out: experts are not ranked by router logits alone".to_owned());
        }
        let prompt = prompt(vault);
        let tokens: Vec<u32> = prompt.iter().copied().cycle().take(prompt.len() + DECODED).collect();
        let (got, expected) = (decode(vault, device, &tokens)?, decode(vault, &DeviceChoice::Cpu, &tokens)?);
        let mut routers = Routers(vec![Vec::new(); vault.spec.moe_layers().count()]);
        open(vault, &DeviceChoice::Cpu)?.observe(&tokens, &mut routers).map_err(|e| e.to_string())?;
        let behind_prompt = prompt.len() * moe.n_experts;
        let routers: Vec<&[f32]> = routers.0.iter().map(|rows| &rows[behind_prompt..]).collect();
        compare_decoded(&got, &expected, &routers, moe.n_experts)
    }

    /// Logits are the same as far as both route alike. Where they do not, the processor must have been in two minds: an
    /// expert that only it chose and one that only the device chose have nearly the same router logit (`routers`,
    /// `[MoE layer][tokens, n_experts]`) in the first layer in which they differ; later ones see what other experts made.
    /// Half of the tokens must be routed alike. Those before the first that is not have the same logits, all of them; of those
    /// behind it, which may see its keys and values, nine tenths.
    fn compare_decoded(
        got: &Decoded,
        expected: &Decoded,
        routers: &[&[f32]],
        n_experts: usize,
    ) -> Result<String, String> {
        let layers = routers.len();
        let positions = expected.routes.len() / layers.max(1);
        if got.routes.len() != expected.routes.len() || positions == 0 {
            return Err(format!("routes of {} of {positions} tokens", got.routes.len() / layers.max(1)));
        }
        let vocab_size = expected.logits.len() / positions;
        let (mut alike, mut close, mut far) = (0, 0, 0);
        let mut worst = 0f32;
        for position in 0..positions {
            let at = position * layers;
            let differs = |layer: &usize| got.routes[at + layer] != expected.routes[at + layer];
            let Some(layer) = (0..layers).find(differs) else {
                let [got, expected] =
                    [got, expected].map(|of| &of.logits[position * vocab_size..][..vocab_size]);
                let (off, largest) = distance(got, expected);
                let is_far = off > TOLERANCE * largest;
                if is_far && close == 0 {
                    return Err(format!("token {position}: logits off by {off:.2e} of {largest:.2e}"));
                }
                worst = worst.max(off / largest);
                (alike, far) = (alike + 1, far + usize::from(is_far));
                continue;
            };
            let row = &routers[layer][position * n_experts..][..n_experts];
            let only = |a: &Decoded, b: &Decoded| -> Vec<f32> {
                let other = &b.routes[at + layer];
                let own = a.routes[at + layer].iter().filter(|id| !other.contains(id));
                own.map(|&id| row[usize::from(id)]).collect()
            };
            let least = only(got, expected).into_iter().fold(f32::INFINITY, f32::min);
            let most = only(expected, got).into_iter().fold(f32::NEG_INFINITY, f32::max);
            let largest = row.iter().fold(0f32, |m, v| m.max(v.abs()));
            if most - least > TOLERANCE * largest {
                return Err(format!(
                    "token {position}, MoE layer {layer}: chose an expert of router logit {least:.3} where the processor \
                     chose one of {most:.3}, the largest being {largest:.3}"
                ));
            }
            close += 1;
        }
        if 2 * alike < positions {
            return Err(format!("{alike} of {positions} tokens have the processor's experts"));
        }
        let what = format!(
            "off by {worst:.1e} of the largest; of {positions} tokens {close} had experts too close to call, {far} are \
             further off"
        );
        if far > alike / 10 { Err(what) } else { Ok(what) }
    }

    fn tokens(vault: &Vault, device: &DeviceChoice) -> Result<String, String> {
        const N: usize = 24;
        // The processor's tokens, and how sure it was; the device is given the same tokens.
        let run = |device: &DeviceChoice, given: Option<&[u32]>| -> Result<(Vec<u32>, Vec<f32>), String> {
            let mut engine = open(vault, device)?;
            let mut session: Session = engine.open_session().map_err(|e| e.to_string())?;
            let control = &mut Control::default();
            engine.sync(&mut session, &prompt(vault), control).map_err(|e| e.to_string())?;
            let mut sampler =
                Sampler::new(Sampling::default(), vault.spec.vocab_size).map_err(|e| e.to_string())?;
            let (mut chosen, mut margins) = (Vec::new(), Vec::new());
            for i in 0..N {
                let mut sorted = session.logits().to_vec();
                sorted.sort_unstable_by(f32::total_cmp);
                let largest = sorted.last().map_or(0.0, |l| l.abs());
                margins.push((sorted[sorted.len() - 1] - sorted[sorted.len() - 2]) / largest);
                let token = engine.sample(&session, &mut sampler);
                chosen.push(token);
                let next = given.map_or(token, |given| given[i]);
                engine.decode(&mut session, next, control).map_err(|e| e.to_string())?;
            }
            Ok((chosen, margins))
        };
        let (expected, margins) = run(&DeviceChoice::Cpu, None)?;
        let (got, _) = run(device, Some(&expected))?;
        let mut close = 0;
        for i in 0..N {
            if got[i] != expected[i] {
                if margins[i] > TOLERANCE {
                    return Err(format!("token {i} is {}, not {}", got[i], expected[i]));
                }
                close += 1;
            }
        }
        Ok(format!("{} of {N} the processor's, {close} too close to call", N - close))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Tokens of a model of one MoE layer, three experts and one logit each.
        fn decoded(logits: &[f32], routes: &[[u16; 2]]) -> Decoded {
            Decoded { logits: logits.to_vec(), routes: routes.iter().map(|ids| ids.to_vec()).collect() }
        }

        /// Four tokens; the second expert and the third are close for the first token only.
        fn compared(got: &Decoded) -> Result<String, String> {
            let expected = decoded(&[1.0, 2.0, 3.0, 4.0], &[[0, 1], [0, 2], [0, 2], [0, 2]]);
            let router = [3.0, 2.0, 1.95, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0];
            compare_decoded(got, &expected, &[&router], 3)
        }

        const ALIKE: [[u16; 2]; 4] = [[0, 1], [0, 2], [0, 2], [0, 2]];
        const CLOSE: [[u16; 2]; 4] = [[0, 2], [0, 2], [0, 2], [0, 2]];

        #[test]
        fn tokens_that_are_routed_alike_have_the_same_logits() {
            let text = compared(&decoded(&[1.01, 2.0, 3.0, 4.0], &ALIKE)).expect("within the tolerance");
            assert!(text.contains(" 0 had experts too close to call, 0 are further off"), "{text}");
            for wrong in [1.2, f32::NAN, f32::INFINITY] {
                assert!(compared(&decoded(&[wrong, 2.0, 3.0, 4.0], &ALIKE)).is_err(), "{wrong}");
            }
        }

        #[test]
        fn tokens_may_be_routed_otherwise_if_experts_are_too_close_to_call() {
            // Then the logits may be anything, though not those of the other tokens.
            let text = compared(&decoded(&[9.0, 2.0, 3.0, 4.0], &CLOSE)).expect("close experts");
            assert!(text.contains(" 1 had experts too close to call"), "{text}");
            assert!(compared(&decoded(&[9.0, 2.2, 3.0, 4.0], &CLOSE)).is_err());
            let text = compared(&decoded(&[1.0, 2.0, 3.0, 4.0], &[[0, 1]; 4])).expect_err("another expert");
            assert!(text.contains("token 1, MoE layer 0"), "{text}");
            assert!(compared(&decoded(&[1.0], &ALIKE[..1])).is_err());
        }

        #[test]
        fn half_of_the_tokens_must_be_routed_alike() {
            let expected = decoded(&[1.0, 1.0], &[[0, 1]; 2]);
            let router: &[f32] = &[3.0, 2.0, 1.95, 3.0, 2.0, 1.95];
            let compared =
                |routes: &[[u16; 2]]| compare_decoded(&decoded(&[1.0, 1.0], routes), &expected, &[router], 3);
            assert!(compared(&[[0, 1], [0, 2]]).is_ok());
            assert!(compared(&[[0, 2]; 2]).is_err());
        }
    }
}

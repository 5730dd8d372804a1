//! Several kernels' texts as one kernel, whose workgroups are each one of theirs: what does not depend on each other takes one dispatch
//! ("horizontal fusion": Li, Zheng, Pekhimenko, Long, CGO 2022). What a workgroup computes does not change.

use std::collections::HashSet;
use std::fmt::Write as _;

/// A kernel among others.
pub(crate) struct Part<'a> {
    /// Its text; its immediates are `p`, words of which `nothing` is the last, its entry point is `main`.
    pub(crate) source: &'a str,
    /// Its bindings.
    pub(crate) bindings: usize,
    /// Its workgroups, along two axes.
    pub(crate) grid: [u32; 2],
}

/// The text of all.
pub(crate) struct Merged {
    /// The parts' immediates follow each other, `nothing` behind them; bindings too. Workgroups are along one axis, the first part's first.
    pub(crate) source: String,
    /// Words of each part's immediates.
    pub(crate) words: Vec<usize>,
    /// Workgroups.
    pub(crate) workgroups: u32,
}

/// None if workgroups do not have the same number of threads.
pub(crate) fn merged(parts: &[Part<'_>]) -> Option<Merged> {
    let texts: Vec<Text<'_>> = parts.iter().map(|part| Text::new(part.source)).collect();
    let threads = texts.first()?.threads?;
    if texts.iter().any(|text| text.threads != Some(threads)) {
        return None;
    }
    let (mut source, mut members, mut body) = (String::new(), String::new(), String::new());
    let mut builtins: Vec<&str> = Vec::new();
    let (mut words, mut start, mut bound) = (Vec::new(), 0, 0);
    for (i, (part, text)) in parts.iter().zip(&texts).enumerate() {
        let entry = text.write(i, bound, &mut source);
        let _ = write!(members, "of_{i}: Params_{i}, ");
        let [x, y] = part.grid;
        let own = format!("vec3((wg.x - {start}u) % {x}u, (wg.x - {start}u) / {x}u, 0u)");
        let arguments: Vec<&str> = entry
            .iter()
            .map(|&builtin| match builtin {
                "workgroup_id" => own.as_str(),
                other => name_of(other),
            })
            .collect();
        builtins.extend(entry.iter().filter(|builtin| **builtin != "workgroup_id"));
        start += x * y;
        bound += part.bindings;
        words.push(text.words);
        let _ = writeln!(
            body,
            "    if (wg.x < {start}u) {{\n        main_{i}({});\n        return;\n    }}",
            arguments.join(", ")
        );
    }
    builtins.sort_unstable();
    builtins.dedup();
    let builtins: String =
        builtins.iter().map(|builtin| format!(", @builtin({builtin}) {}: u32", name_of(builtin))).collect();
    let source = format!(
        "struct Params {{ {members}nothing: u32 }}\nvar<immediate> p: Params;\n{source}\n\
         @compute @workgroup_size({threads})\nfn main(@builtin(workgroup_id) wg: vec3<u32>{builtins}) {{\n{body}}}\n"
    );
    Some(Merged { source, words, workgroups: start })
}

/// What the merged entry point calls a builtin of one word.
fn name_of(builtin: &str) -> &'static str {
    match builtin {
        "local_invocation_index" => "lane",
        "subgroup_size" => "width",
        "subgroup_invocation_id" => "place",
        other => panic!("kernels beside each other take no {other}"),
    }
}

/// A kernel's text in words, numbers, single marks, and white space; comments are left out.
struct Text<'a> {
    tokens: Vec<&'a str>,
    /// What it declares outside of functions.
    declared: HashSet<&'a str>,
    /// Of a workgroup, as `THREADS` says it.
    threads: Option<u32>,
    /// Of its immediates.
    words: usize,
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

impl<'a> Text<'a> {
    fn new(source: &'a str) -> Self {
        let tokens = tokens(source);
        let meant: Vec<&str> = tokens.iter().copied().filter(|token| !token.trim().is_empty()).collect();
        let (mut declared, mut threads, mut words, mut depth) = (HashSet::new(), None, 0, 0);
        for (at, &token) in meant.iter().enumerate() {
            match token {
                "{" => depth += 1,
                "}" => depth -= 1,
                "fn" | "struct" | "const" | "alias" | "var" if depth == 0 => {
                    let mut name = at + 1;
                    if meant[name] == "<" {
                        name += meant[name..].iter().position(|token| *token == ">").map_or(0, |end| end + 1);
                    }
                    declared.insert(meant[name]);
                    match (token, &meant[name..]) {
                        ("const", ["THREADS", ":", "u32", "=", number, ..]) => {
                            threads = number.trim_end_matches('u').parse().ok();
                        }
                        ("struct", ["Params", rest @ ..]) => {
                            words =
                                rest.iter().take_while(|token| **token != "}").filter(|t| **t == ":").count();
                        }
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        Self { tokens, declared, threads, words }
    }

    /// Writes it as the i-th part, its bindings behind `bound` others, and gives the builtins that its entry point takes.
    fn write(&self, i: usize, bound: usize, out: &mut String) -> Vec<&'a str> {
        let mut builtins = Vec::new();
        // The last token that is no space; braces, and those of a structure.
        let (mut last, mut depth, mut in_struct) = ("", 0, false);
        let mut at = 0;
        let past = |from: usize, end: &str| {
            from + self.tokens[from..].iter().position(|token| *token == end).map_or(0, |end| end + 1)
        };
        while at < self.tokens.len() {
            let token = self.tokens[at];
            let next = |n: usize| self.tokens.get(at + n).copied().unwrap_or("");
            match token {
                // Of the entry point.
                "@" if next(1) == "compute" => at += 1,
                "@" if next(1) == "workgroup_size" => at = past(at, ")") - 1,
                "@" if next(1) == "builtin" => {
                    builtins.push(next(3));
                    at = past(at, ")") - 1;
                }
                "@" if next(1) == "binding" => {
                    let _ = write!(out, "@binding({bound}u + ");
                    at += 2;
                }
                "var" if depth == 0 && next(2) == "immediate" => at = past(at, ";") - 1,
                _ => {
                    match token {
                        "{" => depth += 1,
                        "}" => (depth, in_struct) = (depth - 1, in_struct && depth > 1),
                        "struct" => in_struct = true,
                        _ => {}
                    }
                    let is_member = last == "." || (in_struct && depth == 1 && next(1) == ":");
                    match token {
                        "p" if !is_member && self.declared.contains("p") => {
                            let _ = write!(out, "p.of_{i}");
                        }
                        word if !is_member && self.declared.contains(word) => {
                            let _ = write!(out, "{word}_{i}");
                        }
                        other => out.push_str(other),
                    }
                }
            }
            if !token.trim().is_empty() {
                last = token;
            }
            at += 1;
        }
        builtins
    }
}

fn tokens(source: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if first.is_whitespace() {
            rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len())
        } else if is_word(rest) {
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len())
        } else if first.is_ascii_digit() {
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.')).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (token, others) = rest.split_at(len);
        if !token.starts_with("//") {
            tokens.push(token);
        }
        rest = others;
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "const THREADS: u32 = 64u;\nconst N: u32 = 3u; // of all\n\
        struct Params { rows: u32, eps: f32, nothing: u32 }\nvar<immediate> p: Params;\n\
        @group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;\n\
        @group(0) @binding(N - 2u) var<storage, read_write> out: array<f32>;\n\
        struct Job { x: vec2<u32>, at: array<u32, N> }\nvar<workgroup> shares: array<f32, N>;\n\
        fn twice(job: ptr<function, Job>) -> f32 { return f32((*job).x.x * N) * p.eps; }\n\
        @compute @workgroup_size(THREADS)\n\
        fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {\n\
        var job: Job;\njob.x = wg.xy;\nshares[lane % N] = x[0].x;\nworkgroupBarrier();\n\
        if (lane < p.rows) { out[lane] = twice(&job) + shares[0]; }\n}\n";

    fn part(source: &str) -> Part<'_> {
        Part { source, bindings: 2, grid: [5, 2] }
    }

    #[test]
    fn parts_keep_their_names_immediates_and_bindings_apart() {
        let merged = merged(&[part(ONE), part(ONE)]).unwrap_or_else(|| panic!("the same threads"));
        assert_eq!((merged.words, merged.workgroups), (vec![3, 3], 20));
        let source = merged.source;
        for text in [
            "of_0: Params_0, of_1: Params_1, nothing: u32",
            "@binding(2u + N_1 - 2u) var<storage, read_write> out_1",
            "struct Job_1 { x: vec2<u32>, at: array<u32, N_1> }",
            "(*job).x.x * N_1) * p.of_1.eps",
            "job.x = wg.xy",
            "shares_0[lane % N_0] = x_0[0].x",
            "main_1(vec3((wg.x - 10u) % 5u, (wg.x - 10u) / 5u, 0u), lane)",
        ] {
            assert!(source.contains(text), "no {text} in:\n{source}");
        }
        // As a device's compiler is given it: barriers in what is called too.
        let module = naga::front::wgsl::parse_str(&source).unwrap_or_else(|e| panic!("{e}:\n{source}"));
        let capabilities = naga::valid::Capabilities::all();
        let mut validator = naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities);
        validator.validate(&module).unwrap_or_else(|e| panic!("{e:?}:\n{source}"));
    }

    #[test]
    fn kernels_of_other_threads_stay_apart() {
        let other = ONE.replace("64u", "128u");
        assert!(merged(&[part(ONE), part(&other)]).is_none());
    }
}

// Biases of a layer's experts: gates', ups' and downs' of the first, then of the next.
//
// Needs: experts.wgsl, consts BIAS (their binding), BIASES (of an expert), BIAS_AT (where those of a product begin), UPS_AT
// (where the ups' do).

@group(0) @binding(BIAS) var<storage, read> biases: array<f32>;

// Where those of the entry's expert begin.
var<private> first_bias: u32;

fn take_biases(entry: u32) {
    first_bias = list[entry + 1u].w * BIASES;
}

fn biased(sum: f32, row: u32) -> f32 {
    return sum + biases[first_bias + BIAS_AT + row];
}

fn biased_up(sum: f32, row: u32) -> f32 {
    return sum + biases[first_bias + UPS_AT + row];
}

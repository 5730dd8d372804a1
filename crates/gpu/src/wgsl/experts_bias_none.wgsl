// What experts_bias.wgsl does, of experts that have none.

fn take_biases(entry: u32) {}

fn biased(sum: f32, row: u32) -> f32 {
    return sum;
}

fn biased_up(sum: f32, row: u32) -> f32 {
    return sum;
}

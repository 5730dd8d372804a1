// Units of rows of halves: eight columns are sixteen bytes.

alias Unit = vec4<u32>;

/// Unit of the row that begins at `start`.
fn unit_at(start: u32, unit: u32) -> Unit {
    return keys[start + unit];
}

fn first_word(unit: Unit) -> vec4<f32> {
    return widen_value(unit.xy);
}

fn second_word(unit: Unit) -> vec4<f32> {
    return widen_value(unit.zw);
}

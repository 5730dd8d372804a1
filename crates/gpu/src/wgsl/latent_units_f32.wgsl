// Units of rows of f32: eight columns are twice sixteen bytes.

alias Unit = array<vec4<u32>, 2>;

/// Unit of the row that begins at `start`; the second half of the last one may not be there.
fn unit_at(start: u32, unit: u32) -> Unit {
    return Unit(keys[start + 2u * unit], keys[start + min(2u * unit + 1u, QUERY_WORDS - 1u)]);
}

fn first_word(unit: Unit) -> vec4<f32> {
    return widen_value(unit[0]);
}

fn second_word(unit: Unit) -> vec4<f32> {
    return widen_value(unit[1]);
}

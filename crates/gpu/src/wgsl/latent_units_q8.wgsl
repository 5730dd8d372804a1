// Units of rows of bytes: eight columns are half of sixteen bytes.

alias Unit = vec2<u32>;

/// Unit of the row that begins at `start`; behind the last column there is a scale.
fn unit_at(start: u32, unit: u32) -> Unit {
    let at = NARROW * start + 2u * unit;
    return Unit(values[at], values[at + 1u]);
}

fn first_word(unit: Unit) -> vec4<f32> {
    return widen_value(unit.x);
}

fn second_word(unit: Unit) -> vec4<f32> {
    return widen_value(unit.y);
}

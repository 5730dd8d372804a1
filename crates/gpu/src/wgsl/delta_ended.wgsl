// What delta_exit.wgsl does with a lone token's answers, by the workgroup that has made all of a head's: it would take a dispatch more.
//
// Needs: delta_gated.wgsl with an OWN of a head's vectors, delta_net.wgsl, of whose rows a workgroup has all.

var<workgroup> answers: array<vec2<f32>, 2u * OWN>;

fn answer(token: u32, pair: u32, found: vec2<f32>) {
    answers[pair] = found;
}

fn end(lane: u32) {
    workgroupBarrier();
    let is_one = lane < OWN / WORDS;
    var x: array<vec4<f32>, WORDS>;
    var gates: array<vec4<f32>, WORDS>;
    for (var i = 0u; i < WORDS; i++) {
        // Lanes that have nothing to do repeat the first ones, and write nothing.
        let own = own_of(lane % (OWN / WORDS), i);
        x[i] = vec4(answers[2u * own], answers[2u * own + 1u]);
        gates[i] = plane[GATE_AT / 4u + head * OWN + own];
        if (is_one) {
            add_square(own, x[i]);
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < WORDS; i++) {
        let own = own_of(lane % (OWN / WORDS), i);
        x[i] = gated(own, x[i], gates[i], p.norm_eps);
        if (PLANE && is_one) {
            store_mixed(0u, head * OWN + own, x[i]);
        }
    }
    if (CODED) {
        let coded = quantise(x);
        if (is_one) {
            store_codes(head * (VALUE_DIM / GROUP) + lane / TEAM, lane % TEAM, coded);
        }
    }
}

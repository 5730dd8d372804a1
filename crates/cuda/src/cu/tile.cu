// Products of coded weights in the vault's own tiles (docs/FORMAT.md, section 6: 32 rows x 64 columns, symmetric) with int8
// activations, for one token.
//
// A warp takes a tile: its lanes read 16-byte pieces side by side, and several tiles are on their way before the first is
// needed. A lane has four columns of eight rows (of four, if codes are bytes); halving exchanges leave it one row. The
// integers of a group are exact; groups are added in ascending order by one fused multiply-add each, in the end, by one
// warp: the bits are those of the processor's `coded_matmul`.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef unsigned char u8;
#define DEV __device__ __forceinline__
#define ALL 0xffffffffu

// Weights: streamed past the first cache, and never written while kernels run.
DEV uint4 load_piece(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

DEV u16 load_half(const u16* p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

DEV float from_half(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEV u16 to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }

// Four unsigned bytes times four signed ones, added to c.
DEV int dot4(u32 codes, u32 x, int c) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(codes), "r"(x), "r"(c));
    return d;
}

// PIECES of 16 bytes a tile, OWN of them a lane's codes, MOST the largest code.
template <int BITS> struct Form;
template <> struct Form<4> { enum { PIECES = 68, OWN = 2, MOST = 15 }; };
template <> struct Form<8> { enum { PIECES = 132, OWN = 4, MOST = 255 }; };

template <int BITS> struct Tile {
    uint4 pieces[Form<BITS>::OWN];
    u16 scale;
};

// The row of a block that a lane ends with.
template <int BITS> DEV int row_of(int lane) {
    return BITS == 4 ? 16 * (lane >> 4) + 4 * (lane & 3) + ((lane >> 2) & 3)
                     : 16 * ((lane >> 2) & 1) + 4 * (lane & 3) + 2 * ((lane >> 4) & 1) + ((lane >> 3) & 1);
}

// Where a lane reads in a run of tiles.
template <int BITS> struct Reader {
    const uint4* pieces;
    const u16* scale;
    DEV Reader(const uint4* tiles, int first, int lane) {
        const uint4* tile = tiles + (u32)first * Form<BITS>::PIECES;
        pieces = tile + lane;
        scale = (const u16*)(tile + (Form<BITS>::PIECES - 4)) + row_of<BITS>(lane);
    }
    DEV void load(Tile<BITS>& tile, int ahead) const {
#pragma unroll
        for (int k = 0; k < Form<BITS>::OWN; k++) tile.pieces[k] = load_piece(pieces + 32 * k + ahead * Form<BITS>::PIECES);
        tile.scale = load_half(scale + 8 * ahead * Form<BITS>::PIECES);
    }
    DEV void step(int tiles) {
        pieces += tiles * Form<BITS>::PIECES;
        scale += 8 * tiles * Form<BITS>::PIECES;
    }
};

// What a lane keeps and what its partner sent of what it keeps.
DEV int exchange(int keep, int send, int mask) { return keep + __shfl_xor_sync(ALL, send, mask); }

// The sum of code * x of the lane's row.
template <int BITS> DEV int dot(const Tile<BITS>& tile, const u32* x, int lane) {
    bool upper = lane & 16, second = lane & 8;
    if (BITS == 4) {
        u32 x0 = x[lane >> 2], x1 = x[8 + (lane >> 2)];
        int v[8];
        const u32* a = &tile.pieces[0].x;
        const u32* b = &tile.pieces[1].x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = dot4(a[i] & 0x0f0f0f0fu, x0, dot4(b[i] & 0x0f0f0f0fu, x1, 0));
            // Sixteen times: shifted back in the end.
            v[4 + i] = dot4(a[i] & 0xf0f0f0f0u, x0, dot4(b[i] & 0xf0f0f0f0u, x1, 0));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = exchange(upper ? v[4 + i] : v[i], upper ? v[i] : v[4 + i], 16);
#pragma unroll
        for (int i = 0; i < 2; i++) v[i] = exchange(second ? v[2 + i] : v[i], second ? v[i] : v[2 + i], 8);
        bool third = lane & 4;
        int sum = exchange(third ? v[1] : v[0], third ? v[0] : v[1], 4);
        return upper ? sum >> 4 : sum;
    } else {
        int v[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < Form<BITS>::OWN; k++) {
            u32 word = x[(lane >> 3) + 4 * k];
            const u32* a = &tile.pieces[k].x;
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = dot4(a[i], word, v[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) v[i] = exchange(upper ? v[2 + i] : v[i], upper ? v[i] : v[2 + i], 16);
        return exchange(second ? v[1] : v[0], second ? v[0] : v[1], 8);
    }
}

// Tiles on their way: AHEAD for each of WARPS.
template <int BITS, int AHEAD> struct Window { Tile<BITS> tiles[AHEAD]; };

template <int BITS, int WARPS, int AHEAD>
DEV void fill(Window<BITS, AHEAD>& window, const Reader<BITS>& reader, int groups, int warp) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (warp + i * WARPS < groups) reader.load(window.tiles[i], i * WARPS);
}

// The sums of a block of 32 rows by WARPS warps, row_of(lane) in each lane of the first. `x` has the codes of the
// activations, `cells` their scales over MOST and their sums, `terms` room for 32 a group. A barrier of the workgroup.
template <int BITS, int WARPS, int AHEAD>
DEV float block_sums(Window<BITS, AHEAD>& window, Reader<BITS> reader, int groups, int warp, int lane, const u32* x,
                     const float2* cells, float2* terms) {
    for (int first = warp; first < groups; first += WARPS * AHEAD) {
        reader.step(WARPS * AHEAD);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int group = first + i * WARPS;
            if (group < groups) {
                int sum = dot<BITS>(window.tiles[i], x + 16 * group, lane);
                float2 cell = cells[group];
                float term = (float)(2 * sum - Form<BITS>::MOST * __float_as_int(cell.y));
                terms[group * 32 + lane] = make_float2(term, from_half(window.tiles[i].scale) * cell.x);
                if (group + WARPS * AHEAD < groups) reader.load(window.tiles[i], i * WARPS);
            }
        }
    }
    __syncthreads();
    float sum = 0.f;
    if (warp == 0) {
#pragma unroll 8
        for (int group = 0; group < groups; group++) {
            float2 term = terms[group * 32 + lane];
            sum = fmaf(term.x, term.y, sum);
        }
    }
    return sum;
}

// A coded row into shared memory, its scales divided on the way.
template <int BITS> DEV void stage(const uint4* codes, const float2* cells, u32* x, float2* to, int groups) {
    for (int i = threadIdx.x; i < 4 * groups; i += blockDim.x) ((uint4*)x)[i] = codes[i];
    for (int i = threadIdx.x; i < groups; i += blockDim.x) {
        float2 cell = cells[i];
        to[i] = make_float2(__fdiv_rn(cell.x, (float)Form<BITS>::MOST), cell.y);
    }
}

// A group of 64, two values a lane, as the processor's `Activations` quantises: its two codes; scale and sum in all lanes.
DEV u32 quantise(float2 v, float& scale, int& sum) {
    u32 most = __reduce_max_sync(ALL, max(__float_as_uint(v.x) & 0x7fffffffu, __float_as_uint(v.y) & 0x7fffffffu));
    float largest = __uint_as_float(most), inverse = __fdiv_rn(127.f, largest);
    u32 bits = __float_as_uint(inverse);
    bool usable = most < 0x7f800000u && most > 0 && bits < 0x7f800000u && bits > 0;
    int a = usable ? min(127, max(-127, __float2int_rn(v.x * inverse))) : 0;
    int b = usable ? min(127, max(-127, __float2int_rn(v.y * inverse))) : 0;
    // Of what is no number the scale is that, so every sum over it is no number either.
    scale = usable ? __fdiv_rn(largest, 127.f) : most >= 0x3f800000u ? largest : 0.f;
    sum = __reduce_add_sync(ALL, a + b);
    return (a & 255) | ((b & 255) << 8);
}

// The processor's exponential (crates/kernels/src/exp.rs).
DEV float exponential(float x) {
    float shifted = fmaf(x, 1.44269502f, 12582912.f);
    float n = (float)(__float_as_int(shifted) - 0x4b400000);
    float r = fmaf(n, 0.000212194442f, fmaf(n, -0.693359375f, x));
    float e = fmaf(0.00140355248f, r, 0.00837230124f);
    e = fmaf(e, r, 0.0416655503f);
    e = fmaf(e, r, 0.166664883f);
    e = fmaf(e, r, 0.5f);
    e = fmaf(e, r, 1.f);
    e = fmaf(e, r, 1.f);
    e = __uint_as_float(__float_as_uint(e) + (__float_as_uint(shifted) << 23));
    u32 bits = __float_as_uint(x);
    if (bits >= 0x42b17218u && bits < 0x80000000u) e = x * 3.0e38f;
    if (bits > 0xc2aeac4fu) e = 0.f;
    return bits > 0xff800000u ? x : e;
}

DEV float silu(float x) { return __fdiv_rn(x, 1.f + exponential(-x)); }

extern __shared__ uint4 shared_memory[];

// The products of a token. Dynamic shared memory: 72 bytes a group, and 256 for its terms (twice for gate and up).
//
// Needs: tile.cu.

// out[r] = W[r] x, a workgroup for 32 rows. Workgroups: (blocks).
template <int BITS, int WARPS, int AHEAD>
DEV void coded_product(const uint4* weights, const uint4* codes, const float2* cells, float* out, int groups, int rows) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32* x = (u32*)shared_memory;
    float2* own = (float2*)(x + 16 * groups);
    Reader<BITS> reader(weights + (u64)blockIdx.x * groups * Form<BITS>::PIECES, warp, lane);
    Window<BITS, AHEAD> window;
    fill<BITS, WARPS, AHEAD>(window, reader, groups, warp);
    stage<BITS>(codes, cells, x, own, groups);
    __syncthreads();
    float sum = block_sums<BITS, WARPS, AHEAD>(window, reader, groups, warp, lane, x, own, own + groups);
    int row = blockIdx.x * 32 + row_of<BITS>(lane);
    if (warp == 0 && row < rows) out[row] = sum;
}

#define CODED(BITS, WARPS, AHEAD)                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) coded_##BITS##_##WARPS(                                 \
        const uint4* weights, const uint4* codes, const float2* cells, float* out, int groups, int rows) {           \
        coded_product<BITS, WARPS, AHEAD>(weights, codes, cells, out, groups, rows);                                 \
    }
CODED(4, 4, 4)
CODED(4, 8, 4)
CODED(4, 16, 4)
CODED(8, 8, 2)
CODED(8, 16, 4)

// Gate, up and SwiGLU of the experts of a token: four warps for 32 rows of gate, four for those of up. A slot has `slot`
// pieces, up begins `up` pieces behind gate. Workgroups: (blocks, experts).
extern "C" __global__ void __launch_bounds__(256)
expert_gate_up(const uint4* slots, const u32* ids, const uint4* codes, const float2* cells, float* hidden, int groups,
               int rows, u64 slot, u64 gate, u64 up) {
    const int WARPS = 4, AHEAD = 4;
    int is_up = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
    __shared__ float ups[32];
    u32* x = (u32*)shared_memory;
    float2* own = (float2*)(x + 16 * groups);
    float2* terms = own + groups + (is_up ? groups * 32 : 0);
    const uint4* matrix = slots + ids[blockIdx.y] * slot + (is_up ? up : gate);
    Reader<4> reader(matrix + (u64)blockIdx.x * groups * Form<4>::PIECES, warp, lane);
    Window<4, AHEAD> window;
    fill<4, WARPS, AHEAD>(window, reader, groups, warp);
    stage<4>(codes, cells, x, own, groups);
    __syncthreads();
    float sum = block_sums<4, WARPS, AHEAD>(window, reader, groups, warp, lane, x, own, terms);
    if (is_up && warp == 0) ups[lane] = sum;
    __syncthreads();
    int row = blockIdx.x * 32 + row_of<4>(lane);
    if (!is_up && warp == 0 && row < rows) hidden[blockIdx.y * rows + row] = silu(sum) * ups[lane];
}

// Down of the experts of a token, by eight warps; each workgroup quantises the hidden row while its weights come.
// Workgroups: (blocks, experts).
extern "C" __global__ void __launch_bounds__(256)
expert_down(const uint4* slots, const u32* ids, const float* hidden, float* out, int groups, int rows, u64 slot, u64 down) {
    const int WARPS = 8, AHEAD = 2;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32* x = (u32*)shared_memory;
    float2* own = (float2*)(x + 16 * groups);
    const uint4* matrix = slots + ids[blockIdx.y] * slot + down;
    Reader<4> reader(matrix + (u64)blockIdx.x * groups * Form<4>::PIECES, warp, lane);
    Window<4, AHEAD> window;
    fill<4, WARPS, AHEAD>(window, reader, groups, warp);
    const float2* row = (const float2*)(hidden + blockIdx.y * 64 * groups);
    for (int group = warp; group < groups; group += WARPS) {
        float scale;
        int sum;
        ((u16*)x)[32 * group + lane] = (u16)quantise(row[32 * group + lane], scale, sum);
        if (lane == 0) own[group] = make_float2(__fdiv_rn(scale, 15.f), __int_as_float(sum));
    }
    __syncthreads();
    float sum = block_sums<4, WARPS, AHEAD>(window, reader, groups, warp, lane, x, own, own + groups);
    int at = blockIdx.x * 32 + row_of<4>(lane);
    if (warp == 0 && at < rows) out[blockIdx.y * rows + at] = sum;
}

// Eight columns of a row of floats.
template <int KIND> struct Eight;
template <> struct Eight<0> {
    uint4 a, b;
    DEV void load(const void* row, int eight) { a = load_piece((const uint4*)row + 2 * eight); b = load_piece((const uint4*)row + 2 * eight + 1); }
    DEV void to(float* f) const {
        f[0] = __uint_as_float(a.x); f[1] = __uint_as_float(a.y); f[2] = __uint_as_float(a.z); f[3] = __uint_as_float(a.w);
        f[4] = __uint_as_float(b.x); f[5] = __uint_as_float(b.y); f[6] = __uint_as_float(b.z); f[7] = __uint_as_float(b.w);
    }
};
template <> struct Eight<1> {
    uint4 a;
    DEV void load(const void* row, int eight) { a = load_piece((const uint4*)row + eight); }
    DEV void to(float* f) const {
        const u32* w = &a.x;
#pragma unroll
        for (int i = 0; i < 4; i++) { f[2 * i] = from_half((u16)w[i]); f[2 * i + 1] = from_half((u16)(w[i] >> 16)); }
    }
};
template <> struct Eight<2> {
    uint4 a;
    DEV void load(const void* row, int eight) { a = load_piece((const uint4*)row + eight); }
    DEV void to(float* f) const {
        const u32* w = &a.x;
#pragma unroll
        for (int i = 0; i < 4; i++) { f[2 * i] = __uint_as_float(w[i] << 16); f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u); }
    }
};
template <int KIND> struct Width { enum { BYTES = KIND == 0 ? 4 : 2 }; };

// Row times x, the same sum in all lanes.
template <int KIND> DEV float float_dot(const u8* row, const float4* x, int eights, int lane) {
    float sum = 0.f;
#pragma unroll 8
    for (int c = lane; c < eights; c += 32) {
        Eight<KIND> w;
        float f[8];
        w.load(row, c);
        w.to(f);
        float4 a = x[2 * c], b = x[2 * c + 1];
        sum = fmaf(f[0], a.x, sum); sum = fmaf(f[1], a.y, sum); sum = fmaf(f[2], a.z, sum); sum = fmaf(f[3], a.w, sum);
        sum = fmaf(f[4], b.x, sum); sum = fmaf(f[5], b.y, sum); sum = fmaf(f[6], b.z, sum); sum = fmaf(f[7], b.w, sum);
    }
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
    return sum;
}

// out[r] = W[r] x for float weights, a warp a row. Workgroups: (rows / 8).
#define FLOATS(NAME, KIND)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(const u8* weights, const float4* x, float* out, int eights, int rows) { \
        int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;                                      \
        if (row >= rows) return;                                                                                     \
        float sum = float_dot<KIND>(weights + (u64)row * eights * 8 * Width<KIND>::BYTES, x, eights, lane);          \
        if (lane == 0) out[row] = sum;                                                                               \
    }
FLOATS(float_f32, 0)
FLOATS(float_f16, 1)
FLOATS(float_bf16, 2)

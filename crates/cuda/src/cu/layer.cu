// What stands between the products of a layer, for one token of a step. `rows[*at]` is that token; the kernels of a token are a
// graph, which is replayed for every token of a step, so whatever differs from token to token is read from memory.
//
// Needs: tile.cu, products.cu; D (hidden states), HEADS, KV_HEADS, HEAD_DIM (64, 128 or 256), HALF (pairs that are rotated),
// KV_KIND (0 f32, 1 f16), EXPERTS, TOP_K, MOE_LAYERS.

struct Row { u32 token, position, table, unused; };

const int BLOCK = 32;
const int GROUPS = D / 64;

// Where key or value head `head` of a position lies, in bytes.
DEV u64 cache_row(const u32* table, u32 position, int plane, int head) {
    const int ROW = HEAD_DIM * (KV_KIND == 0 ? 4 : 2);
    return ((((u64)table[position / BLOCK] * 2 + plane) * KV_HEADS + head) * BLOCK + position % BLOCK) * ROW;
}

// Hidden states become an embedding: 8-bit codes, or floats of a kind. One workgroup.
#define EMBED(NAME, VALUE)                                                                                           \
    extern "C" __global__ void __launch_bounds__(512) NAME(const u8* table, const Row* rows, const u32* at, float* x, float times) { \
        u32 token = rows[*at].token;                                                                                 \
        for (int c = threadIdx.x; c < D; c += 512) x[c] = VALUE * times;                                             \
    }
DEV float code_8(const u8* table, u32 row, int c) {
    const u8* tile = table + ((u64)(row / 32) * GROUPS + c / 64) * 2112;
    int i = row % 32, code = tile[128 * (c % 64 / 4) + 64 * (i / 16) + 4 * (i % 16) + c % 4];
    float scale = from_half(*(const u16*)(tile + 2048 + 2 * i));
    return (float)(2 * code - 255) * __fdiv_rn(scale, 255.f);
}
DEV float code_4(const u8* table, u32 row, int c) {
    const u8* tile = table + ((u64)(row / 32) * GROUPS + c / 64) * 1088;
    int i = row % 32, code = tile[64 * (c % 64 / 4) + 4 * (i % 16) + c % 4] >> (4 * (i / 16)) & 15;
    float scale = from_half(*(const u16*)(tile + 1024 + 2 * i));
    return (float)(2 * code - 15) * __fdiv_rn(scale, 15.f);
}
EMBED(embed_8, code_8(table, token, c))
EMBED(embed_4, code_4(table, token, c))
EMBED(embed_f32, ((const float*)table)[(u64)token * D + c])
EMBED(embed_f16, from_half(((const u16*)table)[(u64)token * D + c]))
EMBED(embed_bf16, __uint_as_float((u32)((const u16*)table)[(u64)token * D + c] << 16))

// Adds to the hidden states nothing (kind 0), a plane (1), or TOP_K weighted ones (2).
DEV float4 added(float4 v, const float4* delta, const float* weights, int kind, int i, float times) {
    if (kind == 0) return v;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (kind == 1) {
        sum = delta[i];
    } else {
        float4 d[TOP_K];
#pragma unroll
        for (int k = 0; k < TOP_K; k++) d[k] = delta[D / 4 * k + i];
#pragma unroll
        for (int k = 0; k < TOP_K; k++) {
            float w = weights[k];
            sum.x = fmaf(w, d[k].x, sum.x); sum.y = fmaf(w, d[k].y, sum.y);
            sum.z = fmaf(w, d[k].z, sum.z); sum.w = fmaf(w, d[k].w, sum.w);
        }
    }
    return make_float4(fmaf(sum.x, times, v.x), fmaf(sum.y, times, v.y), fmaf(sum.z, times, v.z), fmaf(sum.w, times, v.w));
}

const int ROUNDS = (D / 4 + 511) / 512;

// RMSNorm of a row that lies in registers, and its int8 form. One workgroup of 512.
DEV void norm_row(float4* v, const float4* gain, float eps, float4* normed, u32* codes, float2* cells) {
    __shared__ float parts[16];
    int t = threadIdx.x;
    float sum = 0.f;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) sum += v[r].x * v[r].x + v[r].y * v[r].y + v[r].z * v[r].z + v[r].w * v[r].w;
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
    if ((t & 31) == 0) parts[t >> 5] = sum;
    __syncthreads();
    sum = parts[t & 15];
    for (int step = 8; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
    float inverse = __fdiv_rn(1.f, __fsqrt_rn(sum / (float)D + eps));
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = 512 * r + t;
        bool there = i < D / 4;
        float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
        if (there) {
            float4 g = gain[i];
            y = make_float4(v[r].x * inverse * g.x, v[r].y * inverse * g.y, v[r].z * inverse * g.z, v[r].w * inverse * g.w);
            normed[i] = y;
        }
        // Sixteen lanes a group; bits, so that what is no number is the largest.
        u32 most = max(max(__float_as_uint(y.x) & 0x7fffffffu, __float_as_uint(y.y) & 0x7fffffffu),
                       max(__float_as_uint(y.z) & 0x7fffffffu, __float_as_uint(y.w) & 0x7fffffffu));
        for (int step = 8; step; step >>= 1) most = max(most, __shfl_xor_sync(ALL, most, step));
        float largest = __uint_as_float(most), up = __fdiv_rn(127.f, largest);
        u32 bits = __float_as_uint(up);
        bool usable = most < 0x7f800000u && most > 0 && bits < 0x7f800000u && bits > 0;
        float by = usable ? up : 0.f;
        int a = usable ? __float2int_rn(y.x * by) : 0, b = usable ? __float2int_rn(y.y * by) : 0;
        int c = usable ? __float2int_rn(y.z * by) : 0, d = usable ? __float2int_rn(y.w * by) : 0;
        int total = a + b + c + d;
        for (int step = 8; step; step >>= 1) total += __shfl_xor_sync(ALL, total, step);
        if (there) {
            codes[i] = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24);
            float scale = usable ? __fdiv_rn(largest, 127.f) : most >= 0x3f800000u ? largest : 0.f;
            if ((t & 15) == 0) cells[i >> 4] = make_float2(scale, __int_as_float(total));
        }
    }
}

// Adds what came before, and norms. One workgroup.
extern "C" __global__ void __launch_bounds__(512)
add_norm(float4* x, const float4* delta, const float* weights, int kind, float times, const float4* gain, float eps,
     float4* normed, u32* codes, float2* cells) {
    float4 v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = 512 * r + threadIdx.x;
        v[r] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < D / 4) {
            v[r] = added(x[i], delta, weights, kind, i, times);
            if (kind) x[i] = v[r];
        }
    }
    norm_row(v, gain, eps, normed, codes, cells);
}

// The end of a token: its hidden states go to the step's, and the next one comes. One workgroup.
extern "C" __global__ void __launch_bounds__(512)
leave(const float4* x, const float4* delta, const float* weights, float times, float4* hidden, u32* at) {
    u32 token = *at;
    for (int i = threadIdx.x; i < D / 4; i += 512) hidden[(u64)token * (D / 4) + i] = added(x[i], delta, weights, 2, i, times);
    __syncthreads();
    if (threadIdx.x == 0) *at = token + 1;
}

// The final norm of a token of the step. One workgroup.
extern "C" __global__ void __launch_bounds__(512)
final_norm(const float4* hidden, u32 token, const float4* gain, float eps, float4* normed, u32* codes, float2* cells) {
    float4 v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = 512 * r + threadIdx.x;
        v[r] = i < D / 4 ? hidden[(u64)token * (D / 4) + i] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    norm_row(v, gain, eps, normed, codes, cells);
}

// QK-norm (none if `gain` is null), rotation and append: a warp a head. Workgroups: (heads / 4).
extern "C" __global__ void __launch_bounds__(128)
rope(const float* projected, const float* gain, const float2* angles, const Row* rows, const u32* at, const u32* tables,
     float* queries, u8* cache, float eps) {
    const int PER = HEAD_DIM / 32;
    int sub = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x * 4 + sub;
    __shared__ float x[4][HEAD_DIM];
    if (head >= HEADS + 2 * KV_HEADS) return;
    Row row = rows[*at];
    bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
    float v[PER], sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        v[i] = projected[head * HEAD_DIM + lane + 32 * i];
        sum += v[i] * v[i];
    }
    if (!value) {
        if (gain) {
            for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
            float inverse = __fdiv_rn(1.f, __fsqrt_rn(sum / (float)HEAD_DIM + eps));
#pragma unroll
            for (int i = 0; i < PER; i++) v[i] *= inverse * gain[(query ? 0 : HEAD_DIM) + lane + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < PER; i++) x[sub][lane + 32 * i] = v[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int c = lane + 32 * i;
            if (c < 2 * HALF) {
                float2 turn = angles[row.position * HALF + c % HALF];
                v[i] = c < HALF ? v[i] * turn.x - x[sub][c + HALF] * turn.y : v[i] * turn.x + x[sub][c - HALF] * turn.y;
            }
        }
    }
    if (query) {
#pragma unroll
        for (int i = 0; i < PER; i++) queries[head * HEAD_DIM + lane + 32 * i] = v[i];
        return;
    }
    int own = value ? head - HEADS - KV_HEADS : head - HEADS;
    u8* to = cache + cache_row(tables + row.table, row.position, value, own);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (KV_KIND == 0) ((float*)to)[lane + 32 * i] = v[i]; else ((u16*)to)[lane + 32 * i] = to_half(v[i]);
    }
}

// Attention of a query head: SPLITS workgroups of 8 warps take runs of 128 positions in turn, a warp sixteen of them; the last
// one to end joins them, in order. Workgroups: (heads, SPLITS). `partial` has HEAD_DIM + 2 floats a workgroup.
const int SPLITS = 8;
const int PARTIAL = HEAD_DIM + 2;

extern "C" __global__ void __launch_bounds__(256)
attention(const float* queries, const u8* cache, const Row* rows, const u32* at, const u32* tables, float* partial, u32* counters,
          float* out, u16* codes, float2* cells, float scale) {
    const int LANES = HEAD_DIM / 8, SIDE = 32 / LANES, TURNS = 16 / SIDE, KIND = KV_KIND == 0 ? 0 : 1;
    int head = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = lane % LANES, side = lane / LANES;
    __shared__ float score[128];
    __shared__ float sums[8][HEAD_DIM];
    __shared__ bool last;
    Row row = rows[*at];
    int n = row.position + 1, kv = head / (HEADS / KV_HEADS);
    const u32* table = tables + row.table;
    float q[8], acc[8] = {0, 0, 0, 0, 0, 0, 0, 0}, most = -1e30f, total = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] = queries[head * HEAD_DIM + 8 * part + j];
    for (int base = 128 * blockIdx.y; base < n; base += 128 * SPLITS) {
        Eight<KIND> k[TURNS], v[TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            // Past the end the last one is read, and not counted.
            u32 p = min(base + warp * 16 + SIDE * i + side, n - 1);
            k[i].load(cache + cache_row(table, p, 0, kv), part);
            v[i].load(cache + cache_row(table, p, 1, kv), part);
        }
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            float f[8], sum = 0.f;
            k[i].to(f);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(f[j], q[j], sum);
            for (int step = LANES / 2; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
            int slot = warp * 16 + SIDE * i + side;
            if (part == 0) score[slot] = base + slot < n ? sum * scale : -1e30f;
        }
        __syncthreads();
        float s[4] = {score[lane], score[lane + 32], score[lane + 64], score[lane + 96]};
        float peak = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
        for (int step = 16; step; step >>= 1) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, step));
        peak = fmaxf(peak, most);
        float sum = exponential(s[0] - peak) + exponential(s[1] - peak) + exponential(s[2] - peak) + exponential(s[3] - peak);
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
        float before = exponential(most - peak);
        total = total * before + sum;
        most = peak;
#pragma unroll
        for (int j = 0; j < 8; j++) acc[j] *= before;
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            float f[8], w = exponential(score[warp * 16 + SIDE * i + side] - peak);
            v[i].to(f);
#pragma unroll
            for (int j = 0; j < 8; j++) acc[j] = fmaf(w, f[j], acc[j]);
        }
        __syncthreads();
    }
    for (int step = LANES; step < 32; step <<= 1) {
#pragma unroll
        for (int j = 0; j < 8; j++) acc[j] += __shfl_xor_sync(ALL, acc[j], step);
    }
    if (side == 0) {
#pragma unroll
        for (int j = 0; j < 8; j++) sums[warp][8 * part + j] = acc[j];
    }
    __syncthreads();
    int c = threadIdx.x;
    float mixed = 0.f;
    if (c < HEAD_DIM) {
#pragma unroll
        for (int i = 0; i < 8; i++) mixed += sums[i][c];
    }
    // Workgroups that have positions.
    int used = min((n + 127) / 128, SPLITS);
    if (used > 1) {
        if ((int)blockIdx.y >= used) return;
        float* own = partial + (head * SPLITS + blockIdx.y) * PARTIAL;
        if (c < HEAD_DIM) own[c] = mixed;
        if (c == 0) { own[HEAD_DIM] = most; own[HEAD_DIM + 1] = total; }
        __threadfence();
        __syncthreads();
        if (c == 0) last = atomicInc(counters + head, used - 1) == (u32)used - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        const volatile float* all = partial + head * SPLITS * PARTIAL;
        most = -1e30f;
        for (int i = 0; i < used; i++) most = fmaxf(most, all[i * PARTIAL + HEAD_DIM]);
        total = 0.f;
        mixed = 0.f;
        for (int i = 0; i < used; i++) {
            float w = exponential(all[i * PARTIAL + HEAD_DIM] - most);
            total = fmaf(w, all[i * PARTIAL + HEAD_DIM + 1], total);
            if (c < HEAD_DIM) mixed = fmaf(w, all[i * PARTIAL + c], mixed);
        }
    } else if (blockIdx.y > 0) {
        return;
    }
    __syncthreads();
    if (c < HEAD_DIM) {
        mixed = __fdiv_rn(mixed, total);
        out[head * HEAD_DIM + c] = mixed;
        sums[0][c] = mixed;
    }
    __syncthreads();
    if (warp < HEAD_DIM / 64) {
        float size;
        int sum;
        float2 two = make_float2(sums[0][64 * warp + 2 * lane], sums[0][64 * warp + 2 * lane + 1]);
        codes[(head * HEAD_DIM + 64 * warp) / 2 + lane] = (u16)quantise(two, size, sum);
        if (lane == 0) cells[head * (HEAD_DIM / 64) + warp] = make_float2(size, __int_as_float(sum));
    }
}

// Router logits, a warp an expert, and the choice, by the last workgroup to end: the TOP_K largest (the lower id at ties), in
// ascending id, weighted by their softmax among each other (RENORM) or among all, times `times`. Logits go to `seen` too, for the
// host. Workgroups: (experts / 8).
const int PER_LANE = (EXPERTS + 31) / 32;

DEV u32 key_of(float x) { u32 b = __float_as_uint(x); return b & 0x80000000u ? ~b : b | 0x80000000u; }
DEV float of_key(u32 k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); }

#define ROUTER(NAME, KIND)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(const u8* weights, const float4* x, float* seen, int index, \
                                                           const u32* at, u32* counter, u32* ids, float* chosen, float times) { \
        int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;                                      \
        float* logits = seen + ((u64)*at * MOE_LAYERS + index) * EXPERTS;                                            \
        if (row < EXPERTS) {                                                                                         \
            float sum = float_dot<KIND>(weights + (u64)row * D * Width<KIND>::BYTES, x, D / 8, lane);                \
            if (lane == 0) logits[row] = sum;                                                                        \
        }                                                                                                            \
        choose(logits, counter, ids, chosen, times);                                                                 \
    }

DEV void choose(const volatile float* logits, u32* counter, u32* ids, float* chosen, float times) {
    __shared__ bool last;
    int lane = threadIdx.x & 31;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last || threadIdx.x >= 32) return;
    __threadfence();
    u32 keys[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) keys[j] = 32 * j + lane < EXPERTS ? key_of(logits[32 * j + lane]) : 0;
    float top = 0.f, all = 0.f, mine = 0.f, sum = 0.f;
    u32 id = 0xffffffffu;
#pragma unroll 1
    for (int k = 0; k < TOP_K; k++) {
        u32 most = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) most = max(most, keys[j]);
        most = __reduce_max_sync(ALL, most);
        u32 best = 0xffffffffu;
#pragma unroll
        for (int j = PER_LANE - 1; j >= 0; j--) if (keys[j] == most) best = 32 * j + lane;
        best = min(__reduce_min_sync(ALL, best), EXPERTS - 1);
        float logit = of_key(most);
        if (k == 0) {
            top = logit;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) if (keys[j]) all += exponential(of_key(keys[j]) - top);
            for (int step = 16; step; step >>= 1) all += __shfl_xor_sync(ALL, all, step);
        }
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) if (best == (u32)(32 * j + lane)) keys[j] = 0;
        float e = exponential(logit - top);
        sum += e;
        if (lane == k) { mine = e; id = best; }
    }
    int rank = 0;
    for (int k = 0; k < TOP_K; k++) {
        u32 other = __shfl_sync(ALL, id, k);
        rank += other < id || (other == id && k < lane);
    }
    if (lane < TOP_K) {
        ids[rank] = id;
        chosen[rank] = __fdiv_rn(mine, RENORM ? sum : all) * times;
    }
}
ROUTER(router_f32, 0)
ROUTER(router_f16, 1)
ROUTER(router_bf16, 2)

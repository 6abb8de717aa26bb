// A linear layer for the few tokens of a decode step: out[t, n] = sum over k of x[t, k] * w[n, k], in bf16.
//
// Such a product is as fast as its weights can be read, so everything here serves one thing: that reads never pause.
//   * Two blocks, a cluster, share a tile of rows of w: each sums over half of k, and sends its sums of half of the tokens to
//     the other's shared memory. No partial sum goes through global memory.
//   * In a block, one warp reads weights, one the input, four multiply, four apply the epilogue of one tile while the next is
//     multiplied.
//   * Weights depend on nothing. By programmatic dependent launch a product starts while the one before it ends, beside
//     it on the same multiprocessors, and reads its first weights before it waits for its input.
//   * It waits for no more than it needs next: a product announces each tile that it has written, and the next one, which
//     goes through these columns as its k, multiplies with what is there.
//   * The sum of squares of the next norm, the residual, silu and the norm's scale are parts of the epilogue.
// Sums are added in a fixed order: results do not depend on timing.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "hopper.cuh"

namespace {

constexpr int CLUSTER = 2;  // blocks that share a tile
constexpr int SLICE = 64;   // of k in a stage
constexpr int MULTIPLIERS = 4, FINISHERS = 4, READERS = 2;  // warps

enum Epilogue { SCALE = 0, RESIDUAL = 1, SILU = 2 };

// How much of a multiprocessor a block takes. Reads are shared out by multiprocessor, so a product must have one block on
// each, and the next product's block beside it. Two blocks with many bytes do not fit on one, nor two with many
// registers, but one of each does, and in a layer they take turns. TWO is for a product that nothing follows.
enum Kind { MANY_BYTES = 0, MANY_REGISTERS = 1, TWO = 2 };
constexpr int SHARED_BYTES[] = {119 * 1024, 107 * 1024, 113 * 1024};
constexpr int MOST_REGISTERS[] = {72, 96, 96};  // of a thread

struct Product {
    CUtensorMap w, x;
    int epilogue, tiles, slices, tokens, rows, out_stride;
    int second_half;                // SILU: first row of the up projection
    int in_parts;
    float in_mean_factor, eps;
    int trigger;                    // stages before its last one at which a block lets the next product start
    int in_columns, in_count;       // of the input: columns of a part that is announced as one, and parts
    const int* in_ready;            // [in_count]: CLUSTER where they are written; null: wait for the kernel ahead
    int* out_ready;                 // [tiles]: of the output; null: nobody asks
    const float* in_squares;        // [in_parts, tokens]: sums of squares of the input's parts; null: no scale
    const __nv_bfloat16* bias;      // SCALE: [rows], or null
    __nv_bfloat16* out;             // [tokens, out_stride]
    const __nv_bfloat16* residual;  // RESIDUAL: [tokens, out_stride]
    const __nv_bfloat16* norm;      // RESIDUAL: weight of the next norm, [out_stride]
    __nv_bfloat16* scaled;          // RESIDUAL: out * norm
    float* out_squares;             // RESIDUAL: [tiles, tokens]
};

template <int TILE_, int TOKENS_, int KIND_>
struct Shape {
    static constexpr int TILE = TILE_, TOKENS = TOKENS_, KIND = KIND_;
    // Those warps of MANY_REGISTERS that do not work only take registers: more than half of a multiprocessor's in all.
    static constexpr int WORKING = MULTIPLIERS + FINISHERS + READERS;
    static constexpr int WARPS = KIND == MANY_REGISTERS ? (TILE == 64 ? 17 : TILE == 96 ? 13 : 12) : WORKING;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int SHARE = TOKENS / CLUSTER;  // tokens that a block finishes
    static constexpr int ROW = TILE + 4;            // padded, of a received sum
    static constexpr int W_BYTES = TILE * SLICE * 2, X_BYTES = TOKENS * SLICE * 2;
    static constexpr int RECEIVED = CLUSTER * SHARE * ROW;
    static constexpr int STAGES = (SHARED_BYTES[KIND] - 2048 - 4 * RECEIVED) / (W_BYTES + X_BYTES);
    static constexpr int GROUP = 16;  // threads that finish a token
    static constexpr int PER_PASS = 32 * FINISHERS / GROUP, PASSES = SHARE / PER_PASS;
};

template <class S>
struct Shared {
    uint8_t w[S::STAGES][S::W_BYTES];
    // The matrix unit always reads 64 tokens, into what lies behind; what it makes of that is never looked at.
    uint8_t x[S::STAGES][S::X_BYTES];
    float received[S::RECEIVED];  // [CLUSTER, SHARE, ROW]
    uint64_t full[S::STAGES], empty[S::STAGES];
    uint64_t sums_here, sums_read;
};

// What a block works on: tiles first, first + step, ... and the slices of k from begin to end.
struct Work {
    int rank, first, step, begin, slices, stages;

    __device__ explicit Work(const Product& a) {
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        begin = rank * a.slices / CLUSTER;
        slices = (rank + 1) * a.slices / CLUSTER - begin;
        stages = (a.tiles - first + step - 1) / step * slices;
    }
};

// The stages of a block's work, one after the other. Whoever reads for one must be quick, so nothing is divided.
template <class S>
struct Stage {
    const Work& work;
    int number = 0, place = 0, turn = 0, slice = 0, tile;

    __device__ explicit Stage(const Work& work) : work(work), tile(work.first) {}
    __device__ bool inside() const { return number < work.stages; }
    __device__ int k() const { return (work.begin + slice) * SLICE; }
    __device__ void advance() {
        ++number;
        if (++place == S::STAGES) place = 0, turn ^= 1;
        if (++slice == work.slices) slice = 0, tile += work.step;
    }
    // Until what the stage before in its place had there was multiplied.
    __device__ void wait_for_place(Shared<S>& s) const {
        if (number >= S::STAGES) wait_for(&s.empty[place], turn ^ 1);
    }
};

template <class S>
__device__ void read_weights(Shared<S>& s, const Product& a, const Work& work) {
    uint64_t policy = read_once_policy();
    int rows = a.epilogue == SILU ? S::TILE / 2 : S::TILE, to_second = a.epilogue == SILU ? a.second_half : S::TILE / 2;
#pragma unroll 1
    for (Stage<S> stage(work); stage.inside(); stage.advance()) {
        uint64_t* full = &s.full[stage.place];
        uint8_t* to = s.w[stage.place];
        int k = stage.k(), row = stage.tile * rows;
        stage.wait_for_place(s);
        expect(full, S::W_BYTES);
        load_once(to, &a.w, k, row, full, policy);
        load_once(to + S::W_BYTES / 2, &a.w, k, row + to_second, full, policy);
    }
}

// How much of the input is there. All threads of a warp take part.
struct Input {
    const Product& a;
    int thread;
    int next, written;  // the first part that may be missing, and columns ahead of it

    __device__ Input(const Product& a, const Work& work, int thread) : a(a), thread(thread) {
        if (a.in_ready == nullptr) {
            wait_for_input();
            written = a.slices * SLICE;
            return;
        }
        next = work.begin * SLICE / a.in_columns, written = next * a.in_columns;
    }
    // Until the columns of k ahead of `end` are there.
    __device__ __forceinline__ void wait_for(int end) {
        if (written >= end) return;
        while (written < end) {
            bool there = next + thread >= a.in_count || announced(a.in_ready + next + thread) == CLUSTER;
            uint32_t missing = ~__ballot_sync(~0u, there);
            next += missing == 0 ? 32 : __ffs(missing) - 1;
            written = next < a.in_count ? next * a.in_columns : a.slices * SLICE;
        }
        __syncwarp();
        fence_announced();
    }
};

template <class S>
__device__ void read_input(Shared<S>& s, const Product& a, const Work& work, int thread) {
    // The next product may start once this one has asked for its first stages, and for all but `trigger`.
    int last_before = max(min(S::STAGES, work.stages), work.stages - a.trigger) - 1;
    Input input(a, work, thread);
#pragma unroll 1
    for (Stage<S> stage(work); stage.inside(); stage.advance()) {
        uint64_t* full = &s.full[stage.place];
        int k = stage.k();
        stage.wait_for_place(s);
        input.wait_for(k + SLICE);
        if (thread == 0) {
            expect(full, S::X_BYTES);
            load_input(s.x[stage.place], &a.x, k, full);
            // Never before the kernel ahead is done: one that starts early may rely on all but its predecessor being so.
            if (stage.number == last_before) wait_for_input(), let_next_start();
        }
        __syncwarp();
    }
}

template <class S>
__device__ void multiply_tiles(Shared<S>& s, const Product& a, const Work& work, int warp, int lane) {
    // This warp has the sums of 16 tokens, which one block of the cluster finishes.
    int owner = warp * 16 / S::SHARE, token = warp * 16 % S::SHARE + lane / 4;
    bool wanted = warp * 16 < S::TOKENS;
    uint32_t to = address_in(address(s.received + (work.rank * S::SHARE + token) * S::ROW + lane % 4 * 2), wanted ? owner : 0);
    uint32_t barrier = address_in(address(&s.sums_here), wanted ? owner : 0);
    int stage = 0, round = 0;
    for (int tile = work.first; tile < a.tiles; tile += work.step, ++round) {
        float c[S::TILE / 2];
#pragma unroll 1
        for (int slice = 0; slice < work.slices; ++slice, ++stage) {
            int place = stage % S::STAGES;
            wait_for(&s.full[place], stage / S::STAGES & 1);
            __syncwarp();  // lanes may leave the wait one by one, and the next instructions are the warp's
            uint64_t x = describe(s.x[place]), w = describe(s.w[place]);
            begin_products();
#pragma unroll
            for (int k = 0; k < SLICE / 16; ++k) multiply(c, x + k * 2, w + k * 2, slice + k);
            end_products();
            wait_for_products();
            if (lane == 0) arrive(&s.empty[place]);
        }
        // All blocks have read the sums of the round before.
        if (round > 0) wait_for(&s.sums_read, (round - 1) & 1);
        if (!wanted) continue;
#pragma unroll
        for (int n = 0; n < S::TILE / 8; ++n) {
            send(to + 32 * n, c[4 * n], c[4 * n + 1], barrier);
            send(to + 32 * n + 4 * 8 * S::ROW, c[4 * n + 2], c[4 * n + 3], barrier);
        }
    }
}

// Past the first cache: another multiprocessor may have written the place since this one read it last.
__device__ __forceinline__ uint4 load(const void* from) { return __ldcg(static_cast<const uint4*>(from)); }

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& raw) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = __bfloat1622float2(pairs[i]);
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
}

// Rounds the numbers, too: as those who read them will see them.
__device__ __forceinline__ void pack(void* to, float (&from)[8]) {
    uint4 raw;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        float2 pair = __bfloat1622float2(pairs[i]);
        from[2 * i] = pair.x, from[2 * i + 1] = pair.y;
    }
    *static_cast<uint4*>(to) = raw;
}

// Sums the parts of eight rows of one token.
template <class S>
__device__ __forceinline__ void add_up(float (&sum)[8], const float* received) {
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = 0.0f;
#pragma unroll
    for (int part = 0; part < CLUSTER; ++part)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4 four = *reinterpret_cast<const float4*>(received + part * S::SHARE * S::ROW + half * 4);
            sum[half * 4] += four.x, sum[half * 4 + 1] += four.y, sum[half * 4 + 2] += four.z, sum[half * 4 + 3] += four.w;
        }
}

template <class S>
__device__ __forceinline__ float sum_of_group(float value) {
#pragma unroll
    for (int far = S::GROUP / 2; far; far /= 2) value += __shfl_xor_sync(~0u, value, far);
    return value;
}

// 1 / rms of an input token, from the sums of squares that the product before left.
template <class S>
__device__ __forceinline__ float find_scale(const Product& a, int token, int chunk) {
    float squares = 0.0f;
    if (token < a.tokens)
        for (int part = chunk; part < a.in_parts; part += S::GROUP) squares += __ldcg(&a.in_squares[part * a.tokens + token]);
    return rsqrtf(sum_of_group<S>(squares) * a.in_mean_factor + a.eps);
}

// Applies the epilogue to the tiles' sums and writes them. A thread has eight rows of a token, and a token per pass.
template <class S, int EPILOGUE>
__device__ void finish_tiles(Shared<S>& s, const Product& a, const Work& work, int worker) {
    constexpr int WIDTH = EPILOGUE == SILU ? S::TILE / 2 : S::TILE;  // of the output tile
    int chunk = worker % S::GROUP, first_token = worker / S::GROUP, base = work.rank * S::SHARE;
    wait_for_input();
    float scale[S::PASSES];
#pragma unroll
    for (int pass = 0; pass < S::PASSES; ++pass)
        scale[pass] = a.in_squares == nullptr ? 1.0f : find_scale<S>(a, base + pass * S::PER_PASS + first_token, chunk);
    int round = 0;
    for (int tile = work.first; tile < a.tiles; tile += work.step, ++round) {
        int n = tile * WIDTH + chunk * 8;
        bool inside = chunk < WIDTH / 8 && n < a.rows;
        uint4 old[S::PASSES] = {};
        float weight[8] = {};
        if (EPILOGUE == RESIDUAL && inside) {
            unpack(weight, load(a.norm + n));
#pragma unroll
            for (int pass = 0; pass < S::PASSES; ++pass) {
                int token = base + pass * S::PER_PASS + first_token;
                if (token < a.tokens) old[pass] = load(a.residual + static_cast<int64_t>(token) * a.out_stride + n);
            }
        }
        if (EPILOGUE == SCALE && a.bias != nullptr && inside) unpack(weight, load(a.bias + n));
        wait_for(&s.sums_here, round & 1);
        // The next round's bytes are expected before anyone is told that there is room for them.
        if (worker == 0) expect(&s.sums_here, 4 * CLUSTER * S::SHARE * S::TILE);
#pragma unroll
        for (int pass = 0; pass < S::PASSES; ++pass) {
            int token = base + pass * S::PER_PASS + first_token;
            const float* sums = s.received + (pass * S::PER_PASS + first_token) * S::ROW + chunk * 8;
            int64_t place = static_cast<int64_t>(token) * a.out_stride + n;
            float squares = 0.0f;
            if (inside && token < a.tokens) {
                float value[8], other[8] = {};
                add_up<S>(value, sums);
                if (EPILOGUE == SILU) add_up<S>(other, sums + S::TILE / 2);
                if (EPILOGUE == RESIDUAL) unpack(other, old[pass]);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    float& v = value[e];
                    v *= scale[pass];
                    if (EPILOGUE == SCALE) v += weight[e];
                    if (EPILOGUE == RESIDUAL) v += other[e];
                    if (EPILOGUE == SILU) v *= __fdividef(scale[pass] * other[e], 1.0f + __expf(-v));
                }
                pack(a.out + place, value);
                if (EPILOGUE == RESIDUAL) {
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        squares += value[e] * value[e];
                        value[e] *= weight[e];
                    }
                    pack(a.scaled + place, value);
                }
            }
            if (EPILOGUE == RESIDUAL) {
                squares = sum_of_group<S>(squares);
                if (chunk == 0 && token < a.tokens) a.out_squares[tile * a.tokens + token] = squares;
            }
        }
        __syncwarp();
        asm volatile("bar.sync 1, %0;" ::"n"(32 * FINISHERS) : "memory");
        if (worker == 0 && a.out_ready != nullptr) announce(a.out_ready + tile);
        // After the last tile nobody is told: a block may end as soon as it has what it needs.
        if (worker < CLUSTER && tile + work.step < a.tiles)
            asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                             address_in(address(&s.sums_read), worker)) : "memory");
    }
}

template <class S, int EPILOGUE>
__global__ void __maxnreg__(MOST_REGISTERS[S::KIND]) thin_linear(const __grid_constant__ Product a) {
    extern __shared__ uint8_t raw[];
    // The same offset in every block of a cluster, since dynamic shared memory starts at the same place in all.
    Shared<S>& s = *reinterpret_cast<Shared<S>*>(raw + (1024 - address(raw) % 1024) % 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) prepare(&s.full[i], READERS), prepare(&s.empty[i], MULTIPLIERS);
        prepare(&s.sums_here, 1), prepare(&s.sums_read, CLUSTER);
        fence_prepared();
        expect(&s.sums_here, 4 * CLUSTER * S::SHARE * S::TILE);
        fence_async();
    }
    __syncwarp();
    meet_cluster();
    Work work(a);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < MULTIPLIERS)
        multiply_tiles<S>(s, a, work, warp, lane);
    else if (warp < MULTIPLIERS + FINISHERS)
        finish_tiles<S, EPILOGUE>(s, a, work, threadIdx.x - 32 * MULTIPLIERS);
    else if (warp == MULTIPLIERS + FINISHERS && lane == 0)
        read_weights<S>(s, a, work);
    else if (warp == MULTIPLIERS + FINISHERS + 1)
        read_input<S>(s, a, work, lane);
}

struct Choice {
    void (*kernel)(Product);
    int threads, bytes;
};

template <int TILE, int TOKENS, int KIND, int EPILOGUE>
Choice of() {
    using S = Shape<TILE, TOKENS, KIND>;
    return {thin_linear<S, EPILOGUE>, S::THREADS, SHARED_BYTES[KIND]};
}

template <int TILE, int TOKENS>
Choice of_tile(int kind, int epilogue) {
    if constexpr (TILE == 64)  // wider ones need more registers than this kind has
        if (kind == MANY_BYTES && epilogue == RESIDUAL) return of<TILE, TOKENS, MANY_BYTES, RESIDUAL>();
    if (kind == MANY_REGISTERS && epilogue == SCALE) return of<TILE, TOKENS, MANY_REGISTERS, SCALE>();
    if (kind == MANY_REGISTERS && epilogue == SILU) return of<TILE, TOKENS, MANY_REGISTERS, SILU>();
    if (kind == TWO && epilogue == SCALE) return of<TILE, TOKENS, TWO, SCALE>();
    return {nullptr, 0, 0};
}

template <int TOKENS>
Choice of_tokens(int tile, int kind, int epilogue) {
    if (tile == 64) return of_tile<64, TOKENS>(kind, epilogue);
    if (tile == 96) return of_tile<96, TOKENS>(kind, epilogue);
    if (tile == 112) return of_tile<112, TOKENS>(kind, epilogue);
    return {nullptr, 0, 0};
}

Choice choose(int tile, int tokens, int kind, int epilogue) {
    if (tokens > 64) return {nullptr, 0, 0};
    return tokens <= 32 ? of_tokens<32>(tile, kind, epilogue) : of_tokens<64>(tile, kind, epilogue);
}

cudaLaunchConfig_t launch_config(const Choice& choice, int clusters, cudaStream_t stream, cudaLaunchAttribute (&attributes)[2]) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {CLUSTER, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = clusters * CLUSTER, config.blockDim = choice.threads, config.dynamicSmemBytes = choice.bytes;
    config.stream = stream, config.attrs = attributes, config.numAttrs = 2;
    return config;
}

}  // namespace

extern "C" {

int product_bytes() { return sizeof(Product); }

// Describe a bf16 matrix [rows, columns], row-major, read in boxes of box_rows x 64. Returns a CUresult.
int describe_matrix(void* map, const void* data, uint64_t rows, uint64_t columns, uint32_t box_rows, int promoted) {
    return describe_lines(map, data, rows, columns, box_rows, promoted ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Clusters of a kernel that run at once, or a negative cudaError_t.
int clusters_at_once(int tile, int kind, int epilogue) {
    Choice choice = choose(tile, 1, kind, epilogue);
    if (choice.kernel == nullptr) return -static_cast<int>(cudaErrorInvalidValue);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = launch_config(choice, 1, nullptr, attributes);
    cudaError_t error = cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, choice.bytes);
    int clusters = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, choice.kernel, &config);
    return error == cudaSuccess ? clusters : -static_cast<int>(error);
}

// Queue a product; it may start before the kernel ahead of it has ended. Returns a cudaError_t.
int launch_product(const void* given, int tile, int kind, int clusters, cudaStream_t stream) {
    const Product* product = static_cast<const Product*>(given);
    Choice choice = choose(tile, product->tokens, kind, product->epilogue);
    if (choice.kernel == nullptr) return cudaErrorInvalidValue;
    cudaError_t error = cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, choice.bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = launch_config(choice, clusters, stream, attributes);
    return cudaLaunchKernelEx(&config, choice.kernel, *product);
}
}

// The linear layers of a decode step, several in one kernel: out[t, n] = sum over k of x[t, k] * w[n, k], for at most 32
// tokens t, in bf16.
//
// Such a product is as fast as its weights can be read, so everything here serves one thing: that reads never pause.
//   * One block per multiprocessor runs a chain of products ("phases"), each the input of the next. Weights depend on
//     nothing: a warp of its own reads them ahead, through a ring as large as shared memory, across the phases' borders
//     and, by programmatic dependent launch, before the kernel ahead has ended.
//   * Every block has an equal share of all (tile, slice of k) units of a phase, whatever the shape (stream-K, Osama et
//     al. 2023): no tail of half-empty waves.
//   * The next norm's sum of squares, the residual, silu and the norm's scale are parts of the epilogue.
// Tiles that several blocks share are summed by the last of them, always in the same order: results do not depend on
// timing. Blocks wait for each other, so all must run at once: never more blocks than multiprocessors.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int TILE_ROWS = 128;   // rows of w in a tile
constexpr int SLICE = 64;        // of k in a unit
constexpr int TOKENS = 32;
constexpr int W_STAGES = 11;
constexpr int IN_FLIGHT = 3;      // stages of w asked for and not here yet
constexpr int X_STAGES = 4;
constexpr int WARPS = 8;         // that multiply, 16 rows each; two more load w and x
constexpr int WORKERS = 32 * WARPS;
constexpr int THREADS = WORKERS + 64;
constexpr int MAX_PHASES = 4;
constexpr int MAX_PARTS = 6;     // of a tile, that are summed at once
constexpr int W_BYTES = TILE_ROWS * SLICE * 2;
constexpr int X_BYTES = TOKENS * SLICE * 2;
constexpr int STAGED = TILE_ROWS + 4;  // padded row of the output staging
constexpr int PARTIAL = TILE_ROWS * TOKENS;

enum Epilogue { SCALE = 0, RESIDUAL = 1, SILU = 2 };

struct Shared {
    uint8_t w[W_STAGES][W_BYTES];
    uint8_t x[X_STAGES][X_BYTES];
    float staged[TOKENS * STAGED];
    float scale[TOKENS];
    float squares[WARPS][TOKENS];
    uint64_t w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES];
    int last;
};

struct Phase {
    CUtensorMap w, x;
    int epilogue, tiles, slices, out_stride;
    int second_half;                // SILU: first row of the up projection
    int in_parts;
    float in_mean_factor;
    const float* in_squares;        // [in_parts, TOKENS]: sums of squares of the input's parts; null: no scale
    __nv_bfloat16* out;
    const __nv_bfloat16* residual;  // RESIDUAL: [tokens, out_stride]
    const __nv_bfloat16* norm;      // RESIDUAL: weight of the next norm, [out_stride]
    __nv_bfloat16* scaled;          // RESIDUAL: out * norm
    float* out_squares;             // RESIDUAL: [tiles, TOKENS]
};

struct Chain {
    Phase phases[MAX_PHASES];
    int count, tokens;
    float eps;
    float* partials;    // [2 * blocks, PARTIAL]
    int* arrivals;      // [most tiles of a phase], zero between phases
    int* finished;      // [MAX_PHASES + 1] tiles done per phase, and blocks that have ended; zero between launches
};

__device__ __forceinline__ uint32_t address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void load_box(void* target, const CUtensorMap* map, int k, int row, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            address(target)),
        "l"(map), "r"(address(barrier)), "r"(k), "r"(row) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }
__device__ __forceinline__ void wait_for_input() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Units are numbered tile by tile; block b has those from first_unit(b) to first_unit(b + 1).
__device__ __forceinline__ int first_unit(int block, int units) {
    return static_cast<int>(static_cast<int64_t>(block) * units / gridDim.x);
}
__device__ __forceinline__ int block_of(int unit, int units) {
    return static_cast<int>((static_cast<int64_t>(unit + 1) * gridDim.x - 1) / units);
}

__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Reads all weights of the chain, as far ahead as the ring allows.
__device__ void load_weights(Shared& s, const Chain& chain) {
    int i = 0;
    for (int p = 0; p < chain.count; ++p) {
        const Phase& phase = chain.phases[p];
        int units = phase.tiles * phase.slices, end = first_unit(blockIdx.x + 1, units);
        for (int unit = first_unit(blockIdx.x, units); unit < end; ++unit, ++i) {
            int stage = i % W_STAGES, k = unit % phase.slices * SLICE, tile = unit / phase.slices;
            if (i >= W_STAGES) wait_barrier(address(&s.w_empty[stage]), (i / W_STAGES - 1) & 1);
            // More reads under way would not come faster, but hold up the few words that blocks pass to each other.
            int earlier = i - IN_FLIGHT;
            if (earlier >= 0) wait_barrier(address(&s.w_full[earlier % W_STAGES]), earlier / W_STAGES & 1);
            expect(&s.w_full[stage], W_BYTES);
            bool silu = phase.epilogue == SILU;
            int row = silu ? tile * (TILE_ROWS / 2) : tile * TILE_ROWS;
            int second = silu ? phase.second_half + row : row + TILE_ROWS / 2;
            load_box(s.w[stage], &phase.w, k, row, &s.w_full[stage]);
            load_box(s.w[stage] + W_BYTES / 2, &phase.w, k, second, &s.w_full[stage]);
        }
    }
}

// Reads the inputs of the chain, each once all tiles of the phase before are done.
__device__ void load_inputs(Shared& s, const Chain& chain) {
    wait_for_input();
    int i = 0;
    for (int p = 0; p < chain.count; ++p) {
        const Phase& phase = chain.phases[p];
        if (p > 0) {
            int done;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(chain.finished + p - 1) : "memory");
            } while (done < chain.phases[p - 1].tiles);
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        int units = phase.tiles * phase.slices, end = first_unit(blockIdx.x + 1, units);
        for (int unit = first_unit(blockIdx.x, units); unit < end; ++unit, ++i) {
            int stage = i % X_STAGES;
            if (i >= X_STAGES) wait_barrier(address(&s.x_empty[stage]), (i / X_STAGES - 1) & 1);
            expect(&s.x_full[stage], X_BYTES);
            load_box(s.x[stage], &phase.x, unit % phase.slices * SLICE, 0, &s.x_full[stage]);
        }
    }
}

// This worker's share of the sum of squares of input token worker % TOKENS, as the phase before left it.
__device__ __forceinline__ float load_squares(const Phase& phase, int worker) {
    float sum = 0.0f;
    if (phase.in_squares != nullptr)
#pragma unroll 4
        for (int part = worker / TOKENS; part < phase.in_parts; part += WARPS)
            sum += __ldcg(&phase.in_squares[part * TOKENS + worker % TOKENS]);
    return sum;
}

// scale[t] = 1 / rms of input token t, from the workers' shares.
__device__ void find_scales(Shared& s, const Chain& chain, const Phase& phase, float squares, int worker) {
    s.squares[worker / TOKENS][worker % TOKENS] = squares;
    sync_workers();
    if (worker < TOKENS) {
        float total = 0.0f;
        for (int i = 0; i < WARPS; ++i) total += s.squares[i][worker];
        s.scale[worker] = phase.in_squares == nullptr ? 1.0f : rsqrtf(total * phase.in_mean_factor + chain.eps);
    }
    sync_workers();
}

// Leaves this block's part of a tile for the last block of it; true for that last one, with the sum in c.
__device__ bool gather(Shared& s, const Chain& a, float (&c)[TOKENS / 8][4], int tile, int slices, int units, int worker) {
    int from = block_of(tile * slices, units), to = block_of((tile + 1) * slices - 1, units);
    if (from == to) return true;
    auto place = [&](int block) {
        bool later = first_unit(block, units) / slices < tile;  // the tile is not the block's first one
        return reinterpret_cast<float4*>(a.partials + static_cast<int64_t>(2 * block + later) * PARTIAL) + worker;
    };
    float4* own = place(blockIdx.x);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) __stcg(own + j * WORKERS, make_float4(c[j][0], c[j][1], c[j][2], c[j][3]));
    sync_workers();
    if (worker == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(a.arrivals + tile) : "memory");
        s.last = before == to - from;
        if (s.last) a.arrivals[tile] = 0;
    }
    sync_workers();
    if (!s.last) return false;
    // All parts are asked for before the first is added: one way to the second cache and back instead of one per part.
    for (int block = from; block <= to; block += MAX_PARTS) {
        float4 parts[MAX_PARTS][TOKENS / 8];
#pragma unroll
        for (int b = 0; b < MAX_PARTS; ++b)
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j)
                parts[b][j] = block + b <= to ? __ldcg(place(block + b) + j * WORKERS) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            float4 sum = block == from ? make_float4(0, 0, 0, 0) : make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
#pragma unroll
            for (int b = 0; b < MAX_PARTS; ++b) {
                sum.x += parts[b][j].x, sum.y += parts[b][j].y, sum.z += parts[b][j].z, sum.w += parts[b][j].w;
            }
            c[j][0] = sum.x, c[j][1] = sum.y, c[j][2] = sum.z, c[j][3] = sum.w;
        }
    }
    return true;
}

__device__ __forceinline__ void unpack(float (&to)[8], const void* from) {
    // Past the first cache, which does not see what other blocks wrote meanwhile.
    uint4 raw = __ldcg(static_cast<const uint4*>(from));
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = __bfloat1622float2(pairs[i]);
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ void pack(void* to, float (&from)[8]) {
    uint4 raw;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        float2 pair = __bfloat1622float2(pairs[i]);
        from[2 * i] = pair.x, from[2 * i + 1] = pair.y;  // as those who read it will see it
    }
    *static_cast<uint4*>(to) = raw;
}

// Applies the epilogue to a tile's sum and writes it.
template <int EPILOGUE>
__device__ void finish_tile(Shared& s, const Phase& a, int tokens, const float (&c)[TOKENS / 8][4], int tile, int worker) {
    int lane = worker % 32, row = worker / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int token = j * 8 + lane % 4 * 2 + i % 2;
            s.staged[token * STAGED + row + i / 2 * 8] = c[j][i] * s.scale[token];
        }
    sync_workers();
    constexpr int WIDTH = EPILOGUE == SILU ? TILE_ROWS / 2 : TILE_ROWS;  // of the output tile
    constexpr int CHUNKS = WIDTH / 8;
#pragma unroll
    for (int i = worker; i < TOKENS * CHUNKS; i += WORKERS) {
        int token = i / CHUNKS, n = i % CHUNKS * 8;
        int64_t place = static_cast<int64_t>(token) * a.out_stride + tile * WIDTH + n;
        const float* staged = s.staged + token * STAGED + n;
        bool real = token < tokens;
        float value[8], other[8] = {};
        if (EPILOGUE == RESIDUAL && real) unpack(other, a.residual + place);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            value[e] = staged[e];
            if (EPILOGUE == RESIDUAL) value[e] += other[e];
            if (EPILOGUE == SILU) value[e] *= staged[TILE_ROWS / 2 + e] / (1.0f + __expf(-value[e]));
        }
        if (real) pack(a.out + place, value);
        if (EPILOGUE == RESIDUAL) {
            float squares = 0.0f;
            unpack(other, a.norm + tile * TILE_ROWS + n);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                squares += value[e] * value[e];
                value[e] *= other[e];
            }
#pragma unroll
            for (int far = CHUNKS / 2; far; far /= 2) squares += __shfl_xor_sync(~0u, squares, far);
            if (real) pack(a.scaled + place, value);
            if (i % CHUNKS == 0) a.out_squares[tile * TOKENS + token] = squares;
        }
    }
}

__device__ void multiply_phases(Shared& s, const Chain& chain, int worker) {
    int warp = worker / 32, lane = worker % 32;
    wait_for_input();
    float c[TOKENS / 8][4] = {};
    int w_row = warp * 16 + lane % 16, w_chunk = lane / 16;
    int x_row = lane % 8 + lane / 16 * 8, x_chunk = lane / 8 % 2;
    int i = 0;
    float squares = 0.0f;
    bool scaled = false;  // whether the phase's scales are there
    for (int p = 0; p < chain.count; ++p) {
        const Phase& phase = chain.phases[p];
        int slices = phase.slices, units = phase.tiles * slices;
        int first = first_unit(blockIdx.x, units), end = first_unit(blockIdx.x + 1, units);
        for (int unit = first; unit < end; ++unit, ++i) {
            int w_stage = i % W_STAGES, x_stage = i % X_STAGES;
            wait_barrier(address(&s.x_full[x_stage]), i / X_STAGES & 1);
            if (unit == first) squares = load_squares(phase, worker), scaled = false;
            wait_barrier(address(&s.w_full[w_stage]), i / W_STAGES & 1);
            uint32_t w = address(s.w[w_stage]) + w_row * 128, x = address(s.x[x_stage]) + x_row * 128;
#pragma unroll
            for (int k = 0; k < SLICE / 16; ++k) {
                uint32_t weights[4];
                load_matrices(weights, w + (((k * 2 + w_chunk) ^ (w_row % 8)) << 4));
#pragma unroll
                for (int pair = 0; pair < TOKENS / 16; ++pair) {
                    uint32_t tokens[4];
                    load_matrices(tokens, x + pair * 16 * 128 + (((k * 2 + x_chunk) ^ (x_row % 8)) << 4));
                    multiply(c[2 * pair], weights, tokens[0], tokens[1]);
                    multiply(c[2 * pair + 1], weights, tokens[2], tokens[3]);
                }
            }
            __syncwarp();
            if (lane == 0) {
                arrive(&s.w_empty[w_stage]);
                arrive(&s.x_empty[x_stage]);
            }
            if (unit + 1 < end && (unit + 1) % slices != 0) continue;
            int tile = unit / slices;
            if (gather(s, chain, c, tile, slices, units, worker)) {
                if (!scaled) find_scales(s, chain, phase, squares, worker), scaled = true;
                if (phase.epilogue == SCALE) finish_tile<SCALE>(s, phase, chain.tokens, c, tile, worker);
                if (phase.epilogue == RESIDUAL) finish_tile<RESIDUAL>(s, phase, chain.tokens, c, tile, worker);
                if (phase.epilogue == SILU) finish_tile<SILU>(s, phase, chain.tokens, c, tile, worker);
                asm volatile("fence.proxy.async;" ::: "memory");
                sync_workers();
                if (worker == 0)
                    asm volatile("red.add.release.gpu.global.s32 [%0], 1;" ::"l"(chain.finished + p) : "memory");
            }
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j)
                for (int e = 0; e < 4; ++e) c[j][e] = 0.0f;
        }
    }
    // The last block to end finds nobody waiting any more, and leaves the counters as it found them.
    if (worker == 0 && atomicAdd(chain.finished + MAX_PHASES, 1) == gridDim.x - 1)
        for (int p = 0; p <= MAX_PHASES; ++p) chain.finished[p] = 0;
}

__global__ void __launch_bounds__(THREADS, 1) decode_chain(const __grid_constant__ Chain chain) {
    extern __shared__ uint8_t raw[];
    Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    auto prepare = [](uint64_t* barrier, int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < W_STAGES; ++i) prepare(&s.w_full[i], 1), prepare(&s.w_empty[i], WARPS);
        for (int i = 0; i < X_STAGES; ++i) prepare(&s.x_full[i], 1), prepare(&s.x_empty[i], WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x < WORKERS)
        multiply_phases(s, chain, threadIdx.x);
    else if (threadIdx.x == WORKERS)
        load_weights(s, chain);
    else if (threadIdx.x == WORKERS + 32)
        load_inputs(s, chain);
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
    static Encode found = nullptr;
    if (found == nullptr) {
        void* symbol = nullptr;
        cudaDriverEntryPointQueryResult status;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &status) !=
            cudaSuccess)
            return nullptr;
        found = reinterpret_cast<Encode>(symbol);
    }
    return found;
}

}  // namespace

extern "C" {

// Describe a bf16 matrix [rows, columns], row-major, read in boxes of box_rows x 64. Returns a CUresult.
int describe_matrix(CUtensorMap* map, const void* data, uint64_t rows, uint64_t columns, uint32_t box_rows) {
    cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * 2};
    cuuint32_t box[2] = {SLICE, box_rows}, steps[2] = {1, 1};
    Encode encode = encoder();
    if (encode == nullptr) return -1;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

int chain_bytes() { return sizeof(Chain); }

// Launch a chain on as many blocks as there are multiprocessors. Returns a cudaError_t.
int launch_chain(const void* chain, int blocks, cudaStream_t stream) {
    constexpr int bytes = sizeof(Shared) + 1024;
    static_assert(bytes <= 227 * 1024, "shared memory");
    cudaError_t error = cudaFuncSetAttribute(decode_chain, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, decode_chain, *static_cast<const Chain*>(chain));
}
}

// What compute capability 9.0 has and C++ has no words for: barriers in shared memory, clusters, the tensor memory
// accelerator, warp group products, programmatic dependent launch.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

__device__ __forceinline__ uint32_t address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same, but known at run time only: the compiler keeps it, where it would compute it anew at each use.
template <class T>
__device__ __forceinline__ T* kept(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

// For places that the compiler cannot tell to be in shared memory.
__device__ __forceinline__ void load_shared(uint2& words, uint32_t from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared(float4& numbers, uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(numbers.x), "=f"(numbers.y), "=f"(numbers.z), "=f"(numbers.w)
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint2 words) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(words.x), "r"(words.y) : "memory");
}

// Declares the shared memory that a launch asks for. Not a function, which the compiler would compute addresses by.
#define DYNAMIC_SHARED(name) extern __shared__ uint8_t name[]

__device__ __forceinline__ int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t local, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
    return there;
}

// What was written to shared memory comes before what the tensor memory accelerator reads or writes there.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_prepared() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void prepare(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// The same for a barrier of any block of the cluster, given by `address_in`.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(address(barrier)), "r"(parity) : "memory");
}

// Some of a block's threads meet, at a place of their own.
template <int PLACE, int THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(PLACE), "n"(THREADS) : "memory");
}

// The same at a place that is known at run time only; whoever only comes does not wait for the others.
template <int THREADS>
__device__ __forceinline__ void meet_at(int place) {
    asm volatile("bar.sync %0, %1;" ::"r"(place), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void come_to(int place) {
    asm volatile("bar.arrive %0, %1;" ::"r"(place), "n"(THREADS) : "memory");
}

// A warp group's threads change how many registers they have, from what the kernel was compiled for.
template <int COUNT>
__device__ __forceinline__ void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Blocks of a cluster meet. Once barriers are prepared and fenced, there is no other memory to order.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// No block ends before all of its cluster are here: until then others may write to its shared memory.
__device__ __forceinline__ void leave_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void wait_for_input() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Counts one more of those who have written their part of something: what this thread wrote, or saw written at a barrier of its
// block, is there for whoever sees the count.
__device__ __forceinline__ void announce(int* count) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ int announced(const int* count) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}
// Joins those who have done their part of something; returns how many did before. What this thread wrote, or saw written at a
// meeting of its warp, is there for those who join later, and what those before it wrote, for it.
__device__ __forceinline__ int join(int* count) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

// Adds one to a count below 2^30; returns what it was. Nobody waits before that is used, unlike with an atomic addition, which
// the compiler makes one for all threads of a warp, who then share its result.
__device__ __forceinline__ int count_up(int* count) {
    int before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(count), "r"(1 << 30) : "memory");
    return before;
}

// What was seen announced comes before what the tensor memory accelerator reads from now on.
__device__ __forceinline__ void fence_announced() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// A box of a matrix that nobody reads again.
__device__ __forceinline__ void load_once(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(address(to)),
        "l"(map), "r"(address(barrier)), "r"(column), "r"(row), "l"(policy) : "memory");
}

// Fetches a map ahead of its first use.
__device__ __forceinline__ void expect_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a matrix.
__device__ __forceinline__ void load(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            address(to)),
        "l"(map), "r"(address(barrier)), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void load_input(void* to, const CUtensorMap* map, int k, uint64_t* barrier) { load(to, map, k, 0, barrier); }

// A box of a tensor of three dimensions, which lies as a matrix would: a row of 64 numbers for each of its pairs.
__device__ __forceinline__ void load_pairs(void* to, const CUtensorMap* map, int column, int inner, int outer, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            address(to)),
        "l"(map), "r"(address(barrier)), "r"(column), "r"(inner), "r"(outer) : "memory");
}

// Neighbours in memory, a multiple of 16 bytes at multiples of 16 bytes.
__device__ __forceinline__ void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)), "l"(from),
                 "r"(bytes), "r"(address(barrier)) : "memory");
}

// How the matrix unit finds a matrix in shared memory, rows of 64 numbers, swizzled by 128 bytes, eight rows apart 1 KB.
__device__ __forceinline__ uint64_t describe(const void* matrix) {
    constexpr uint64_t swizzled = uint64_t(1) << 62, eight_rows = uint64_t(1024 >> 4) << 32, unused = uint64_t(1) << 16;
    return swizzled | eight_rows | unused | (address(matrix) & 0x3FFFF) >> 4;
}

// The same for a matrix whose rows are along k; what is to the right of its first 64 columns lies `line_bytes` behind them.
__device__ __forceinline__ uint64_t describe_transposed(const void* matrix, int line_bytes) {
    constexpr uint64_t swizzled = uint64_t(1) << 62, eight_rows = uint64_t(1024 >> 4) << 32;
    return swizzled | eight_rows | uint64_t(line_bytes >> 4) << 16 | (address(matrix) & 0x3FFFF) >> 4;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Waits until no more than so many groups of products, the last ones, are under way.
template <int COUNT>
__device__ __forceinline__ void wait_for_products_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

// Tells the compiler that numbers are made before this point, and read after it: it moves nothing over a wait then.
template <int COUNT>
__device__ __forceinline__ void pin(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Has a number that is not negative made before what follows: the assembler moves arithmetic over waits, not over branches.
__device__ __forceinline__ void make_now(float number) {
    asm volatile("{\n.reg .pred fine;\nsetp.ge.f32 fine, %0, 0f00000000;\n@fine bra over;\nnanosleep.u32 1;\nover:\n}\n" ::"f"(number) : "memory");
}

#define NUMBERS_32                                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_8(i)                                                                                              \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define SUMS_32 SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24)
#define MULTIPLY(rows, numbers, sums, x_at, w_at, add_at)                                                              \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" rows        \
                 "k16.f32.bf16.bf16 {" numbers "}, " x_at ", " w_at ", add, 1, 1, 0, 0;\n}\n"                          \
                 : sums                                                                                                \
                 : "l"(x), "l"(w), "r"(add))

// c[t, n] = (add ? c[t, n] : 0) + sum over 16 k of x[t, k] * w[n, k], for 64 t.
__device__ __forceinline__ void multiply(float (&c)[32], uint64_t x, uint64_t w, int add) {
    MULTIPLY("64", NUMBERS_32, SUMS_32, "%32", "%33", "%34");
}

#define NUMBERS_64                                                                                         \
    NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
    "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_64 SUMS_32, SUMS_8(32), SUMS_8(40), SUMS_8(48), SUMS_8(56)
// The rows of x come from registers, those of w are along k.
#define ADD_TRANSPOSED(rows, numbers, sums, x_at, w_at)                                                          \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" rows            \
                 "k16.f32.bf16.bf16 {" numbers "}, {" x_at "}, " w_at ", add, 1, 1, 1;\n}\n"                     \
                 : sums                                                                                         \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w))

// As above, for 128 n.
__device__ __forceinline__ void multiply(float (&c)[64], uint64_t x, uint64_t w, int add) {
    MULTIPLY("128", NUMBERS_64, SUMS_64, "%64", "%65", "%66");
}

// c[t, n] += sum over 16 k of x[t, k] * w[k, n], for 64 t. A thread has of x what it has of the c of two products: pairs of
// neighbours in two columns of eight.
__device__ __forceinline__ void add_transposed(float (&c)[64], const uint32_t (&x)[4], uint64_t w) {
    ADD_TRANSPOSED("128", NUMBERS_64, SUMS_64, "%64, %65, %66, %67", "%68");
}
__device__ __forceinline__ void add_transposed(float (&c)[32], const uint32_t (&x)[4], uint64_t w) {
    ADD_TRANSPOSED("64", NUMBERS_32, SUMS_32, "%32, %33, %34, %35", "%36");
}

// Sends four numbers to a place in another block's shared memory; that block's barrier counts their bytes.
__device__ __forceinline__ void send(uint32_t to, float a, float b, float c, float d, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(__float_as_uint(c)), "r"(__float_as_uint(d)), "r"(barrier)
                 : "memory");
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function that makes a tensor map, or null.
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

// Describe a tensor of bf16, innermost dimension first, strides in numbers, swizzled by 128 bytes. Returns a CUresult.
template <int DIMENSIONS>
int describe_tensor(void* map, const void* data, const cuuint64_t (&sizes)[DIMENSIONS], const cuuint64_t (&strides)[DIMENSIONS - 1],
                    const cuuint32_t (&box)[DIMENSIONS], CUtensorMapL2promotion promotion) {
    cuuint64_t bytes[DIMENSIONS - 1];
    cuuint32_t steps[DIMENSIONS];
    for (int i = 0; i < DIMENSIONS - 1; ++i) bytes[i] = strides[i] * 2;
    for (cuuint32_t& step : steps) step = 1;
    Encode encode = encoder();
    if (encode == nullptr) return -1;
    return encode(static_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, DIMENSIONS, const_cast<void*>(data), sizes, bytes, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A matrix [rows, columns], row-major, read in boxes of box_rows x 64.
int describe_lines(void* map, const void* data, uint64_t rows, uint64_t columns, uint32_t box_rows, CUtensorMapL2promotion promotion) {
    return describe_tensor<2>(map, data, {columns, rows}, {columns}, {64, box_rows}, promotion);
}

// Numbers [outer, inner, columns], the last ones neighbours, read in boxes of box_outer x box_inner x 64.
int describe_pairs(void* map, const void* data, const uint64_t (&sizes)[3], const uint64_t (&strides)[2], uint32_t box_outer,
                   uint32_t box_inner) {
    return describe_tensor<3>(map, data, {sizes[2], sizes[1], sizes[0]}, {strides[1], strides[0]}, {64, box_inner, box_outer},
                              CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace

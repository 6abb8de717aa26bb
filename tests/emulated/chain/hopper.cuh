// `twostroke/kernels/hopper.cuh`, as far as the chain of thin products uses it, by a `Grid`. Everything is as late, or as
// early, as it may be: where something is under way to, there is NaN until it lands; a copy's source is read when it is asked
// for; operands of products are read when they are waited for.

#pragma once

#include "cuda.h"
#include "cuda_bf16.h"
#include "grid.h"

#define DYNAMIC_SHARED(name) unsigned char* name = shared_memory + 16

// A barrier: phases that have ended; arrivals of each, those that the present one lacks, and bytes that it waits for.
struct Barrier {
    uint16_t ended;
    uint8_t arrivals, missing;
    int32_t bytes;

    void arrive() {
        if (missing == 0) return fail("an arrival at a barrier whose phase has had all");
        --missing;
        end_phase();
    }
    void land(int landed) {
        bytes -= landed;
        if (missing == 0 && bytes < 0) return fail("more bytes than a barrier expects");
        end_phase();
    }

private:
    void end_phase() {
        if (missing == 0 && bytes == 0) ++ended, missing = arrivals;
    }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));
inline Barrier& of(uint64_t* barrier) { return *reinterpret_cast<Barrier*>(barrier); }

// An address of another block of the cluster: above 24 bits, its rank and one.
inline uint32_t address_in(uint32_t local, int rank) { return local | uint32_t(rank + 1) << 24; }
inline int block_of(uint32_t there) { return Grid::block_in_cluster((there >> 24) - 1); }
inline uint32_t local_part(uint32_t there) { return there & 0xFFFFFF; }
inline unsigned char* pointer_to(uint32_t there) { return Grid::now->memory(block_of(there)) + local_part(there); }

inline int rank_in_cluster() { return blockIdx.x - Grid::block_in_cluster(0); }

inline void prepare(uint64_t* barrier, int arrivals) { of(barrier) = {0, uint8_t(arrivals), uint8_t(arrivals), 0}; }
inline void fence_prepared() {}
inline void fence_async() {}
inline void expect(uint64_t* barrier, int bytes) {
    of(barrier).bytes += bytes;
    of(barrier).arrive();
}
inline void arrive(uint64_t* barrier) { of(barrier).arrive(); }
inline void arrive_at(uint32_t there) { reinterpret_cast<Barrier*>(pointer_to(there))->arrive(); }
inline void wait_for(uint64_t* barrier, uint32_t parity) {
    Warp::wait_until({"the barrier", address(barrier), [barrier, parity] { return (of(barrier).ended & 1) != parity; }});
}

template <int PLACE, int THREADS>
void meet() {
    Grid::now->meet_block(PLACE, THREADS);
}
inline void __syncthreads() { Grid::now->meet_block(0); }
inline void meet_cluster() { Grid::now->meet_cluster(); }
inline void leave_cluster() { Grid::now->meet_cluster(); }

// Programmatic dependent launch: whether the kernel ahead has ended.
inline bool input_is_there;
inline void wait_for_input() { Warp::wait_until({"the kernel ahead", 0, [] { return input_is_there; }}); }
inline void let_next_start() {
    if (!input_is_there) fail("the next kernel may start before the one ahead has ended");
}

// A product that a thread has asked for.
struct Operation {
    float* sums;  // its part of c
    uint64_t x, w;
    bool add;
};
// What a thread has done last.
struct Memory {
    const int* looked_at;  // a count
    int looked;     // announcements by then
    bool unfenced;  // it saw one, and has not told the tensor memory accelerator
    std::vector<Operation> products;
};
inline std::map<std::pair<int, int>, Memory> memories;
inline Memory& own_memory() { return memories[{blockIdx.x, threadIdx.x}]; }

inline int announcements;
inline void announce(int* count) {
    ++*count, ++announcements;
    Warp::wait_until({"nothing", 0, [] { return true; }});
}
// Who looks again where it has just looked waits until somebody has announced something.
inline int announced(const int* count) {
    Memory& own = own_memory();
    int looked = own.looked_at == count ? own.looked : -1;
    Warp::wait_until({"an announcement", 0, [looked] { return announcements != looked; }});
    own.looked_at = count, own.looked = announcements, own.unfenced = true;
    return *count;
}
inline void fence_announced() { own_memory().unfenced = false; }

inline uint64_t read_once_policy() { return 0; }
inline void expect_map(const CUtensorMap*) {}

inline void load(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
    if (address(to) % 1024) fail("a box that is not aligned to the pattern of its swizzle");
    std::vector<unsigned char> box(map->box_rows * 128);
    write_box(box.data(), map, column, row);
    memset(to, 0xFF, box.size());
    Grid::now->later([=, block = blockIdx.x] {
        Grid::now->memory(block);
        memcpy(to, box.data(), box.size());
        of(barrier).land(box.size());
    });
}
inline void load_once(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier, uint64_t) { load(to, map, column, row, barrier); }
inline void load_input(void* to, const CUtensorMap* map, int k, uint64_t* barrier) {
    if (own_memory().unfenced) fail("an input is read without a fence after its announcement");
    load(to, map, k, 0, barrier);
}

inline void send(uint32_t there, float a, float b, float c, float d, uint32_t barrier) {
    std::array<float, 4> sent = {a, b, c, d};
    memset(pointer_to(there), 0xFF, sizeof sent);
    Grid::now->later([=, block = block_of(there)] {
        unsigned char* memory = Grid::now->memory(block);
        memcpy(memory + local_part(there), &sent, sizeof sent);
        reinterpret_cast<Barrier*>(memory + local_part(barrier))->land(sizeof sent);
    });
}

// Where a matrix begins, rows of 64 numbers, eight rows apart 1 KB; by 128 bytes swizzled.
inline uint64_t describe(const void* matrix) { return (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16) | address(matrix) >> 4; }

inline float number_of(uint64_t matrix, int row, int k) {
    uint32_t at = uint32_t(matrix & 0x3FFF) * 16 + row / 8 * uint32_t(matrix >> 32 & 0x3FFF) * 16 + row % 8 * 128 + k * 2;
    __nv_bfloat16 number;
    memcpy(&number, shared_memory + (at ^ (at >> 7 & 7) << 4), 2);
    return __bfloat162float(number);
}

inline void begin_products() {}
inline void end_products() {}
inline void multiply(float (&c)[32], uint64_t x, uint64_t w, int add) { own_memory().products.push_back({c, x, w, add != 0}); }

// c of a warp: of 16 rows of x and 64 of w.
struct Sums {
    float of[16][64];

    void add(uint64_t x, uint64_t w, int first_row) {
        for (int k = 0; k < 16; ++k) {
            float column[64];
            for (int n = 0; n < 64; ++n) column[n] = number_of(w, n, k);
            for (int m = 0; m < 16; ++m) {
                float left = number_of(x, first_row + m, k);
                for (int n = 0; n < 64; ++n) of[m][n] += left * column[n];
            }
        }
    }
    float& of_thread(int thread, int i) { return of[thread / 4 + i / 2 % 2 * 8][i / 4 * 8 + thread % 4 * 2 + i % 2]; }
};

// The first thread of the warp to be here again does the work of all.
inline void wait_for_products() {
    std::vector<std::vector<Operation>*> all = Warp::exchange(PRODUCT, &own_memory().products);
    Sums sums;
    for (size_t i = 0; i < all[0]->size(); ++i) {
        Operation first = all[0]->at(i);
        for (int thread = 0; thread < 32; ++thread)
            for (int c = 0; c < 32; ++c) sums.of_thread(thread, c) = first.add ? all[thread]->at(i).sums[c] : 0.0f;
        sums.add(first.x, first.w, threadIdx.x / 32 % 4 * 16);
        for (int thread = 0; thread < 32; ++thread)
            for (int c = 0; c < 32; ++c) all[thread]->at(i).sums[c] = sums.of_thread(thread, c);
    }
    for (std::vector<Operation>* products : all) products->clear();
}

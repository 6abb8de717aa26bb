// `twostroke/kernels/hopper.cuh`, as far as `streamed_prefill.cuh` uses it: what the chain of thin products has, and products as
// they are asked for and waited for in groups. Their factors must be the same all the while, and nobody may touch their sums.

#pragma once

#include <deque>

#define multiply multiply_in_chain
#include "../chain/hopper.cuh"
#undef multiply

template <class T>
T* kept(T* pointer) {
    return pointer;
}

template <class Words>
void load_shared(Words& words, uint32_t from) {
    words = *reinterpret_cast<Words*>(shared_memory + from);
}
inline void store_shared(uint32_t to, uint2 words) { *reinterpret_cast<uint2*>(shared_memory + to) = words; }

template <int COUNT>
void give_registers_back() {}
template <int COUNT>
void take_registers() {}
template <int COUNT>
void pin(float (&)[COUNT]) {}
inline void make_now(float) {}

template <int THREADS>
void meet_at(int place) {
    Grid::now->meet_block(place, THREADS);
}
template <int THREADS>
void come_to(int place) {
    Grid::now->come_to_block(place, THREADS);
}

inline int count_up(int* count) {
    int before = (*count)++;
    Warp::wait_until({"nothing", 0, [] { return true; }});
    return before;
}

// bf16 numbers [outer, inner, columns], read in boxes of box_outer x box_inner x 64.
struct PairsMap {
    const unsigned char* data;
    uint64_t outer, inner, columns, outer_stride, inner_stride;
    uint32_t box_outer, box_inner;
};
static_assert(sizeof(PairsMap) <= sizeof(CUtensorMap));

inline void load_pairs(void* to, const CUtensorMap* map, int column, int inner, int outer, uint64_t* barrier) {
    if (address(to) % 1024) fail("a box that is not aligned to the pattern of its swizzle");
    const PairsMap& pairs = *reinterpret_cast<const PairsMap*>(map);
    std::vector<unsigned char> box(pairs.box_outer * pairs.box_inner * 128);
    for (uint32_t row = 0; row < pairs.box_outer * pairs.box_inner; ++row) {
        uint64_t i = outer + row / pairs.box_inner, j = inner + row % pairs.box_inner;
        if (i >= pairs.outer || j >= pairs.inner) continue;
        const unsigned char* from = pairs.data + (i * pairs.outer_stride + j * pairs.inner_stride + column) * 2;
        for (uint32_t chunk = 0; chunk < 8; ++chunk) memcpy(&box[row * 128 + (chunk ^ row % 8) * 16], from + chunk * 16, 16);
    }
    memset(to, 0xFF, box.size());
    Grid::now->later([=, block = blockIdx.x] {
        Grid::now->memory(block);
        memcpy(to, box.data(), box.size());
        of(barrier).land(box.size());
    });
}

inline void load_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
    if (address(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) fail("bytes that are not at multiples of 16");
    memset(to, 0xFF, bytes);
    Grid::now->later([=, block = blockIdx.x] {
        Grid::now->memory(block);
        memcpy(to, from, bytes);
        of(barrier).land(bytes);
    });
}

inline uint64_t describe_transposed(const void* matrix, int line_bytes) {
    return (uint64_t(1) << 62) | (uint64_t(64) << 32) | uint64_t(line_bytes / 16) << 16 | address(matrix) >> 4;
}

// Of a matrix whose rows are along k: lines of 64 columns lie apart by one distance, eight rows by another.
inline float number_along(uint64_t matrix, int column, int k) {
    uint32_t line = uint32_t(matrix >> 16 & 0x3FFF) * 16, eight = uint32_t(matrix >> 32 & 0x3FFF) * 16;
    uint32_t at = uint32_t(matrix & 0x3FFF) * 16 + column / 64 * line + k / 8 * eight + k % 8 * 128 + column % 64 * 2;
    __nv_bfloat16 number;
    memcpy(&number, shared_memory + (at ^ (at >> 7 & 7) << 4), 2);
    return __bfloat162float(number);
}

// A product that a thread has asked for, of 64 x 16 and 16 x `columns`.
struct Asked {
    float* sums;
    int columns;
    uint64_t x;         // where it is in shared memory, or
    const uint32_t* a;  // in registers
    uint64_t w;
    bool add, first;            // of those under way into these sums
    std::vector<float> before;  // its sums, if it is the first
    std::vector<float> w_seen, x_seen;

    int count() const { return columns / 2; }
};

struct Groups {
    bool fenced = false;
    std::vector<Asked> open;
    std::deque<std::vector<Asked>> under_way;
};
inline std::map<std::pair<int, int>, Groups> groups;
inline Groups& own_groups() { return groups[{blockIdx.x, threadIdx.x}]; }

inline std::vector<float> right_of(const Asked& product) {
    std::vector<float> all(16 * product.columns);
    for (int k = 0; k < 16; ++k)
        for (int n = 0; n < product.columns; ++n) all[k * product.columns + n] = product.a ? number_along(product.w, n, k) : number_of(product.w, n, k);
    return all;
}
// What of x the present thread can see: of its own registers, or the rows of its warp.
inline std::vector<float> left_of(const Asked& product) {
    std::vector<float> all;
    if (product.a) {
        for (int i = 0; i < 8; ++i) all.push_back(__bfloat162float({uint16_t(product.a[i / 2] >> i % 2 * 16)}));
    } else {
        for (int m = 0; m < 16; ++m)
            for (int k = 0; k < 16; ++k) all.push_back(number_of(product.x, threadIdx.x / 32 % 4 * 16 + m, k));
    }
    return all;
}
inline bool same(const std::vector<float>& a, const std::vector<float>& b) { return !memcmp(a.data(), b.data(), a.size() * sizeof(float)); }

inline void ask(Asked product) {
    Groups& own = own_groups();
    if (!own.fenced) fail("products without a fence ahead of them");
    auto into_same = [&](const Asked& other) { return other.sums == product.sums; };
    product.first = std::none_of(own.open.begin(), own.open.end(), into_same);
    for (const auto& group : own.under_way)
        if (std::any_of(group.begin(), group.end(), into_same)) fail("sums of a product that is under way are used by the next group");
    if (product.first) {
        product.before.assign(product.sums, product.sums + product.count());
        memset(product.sums, 0xFF, product.count() * sizeof(float));
    }
    if (Warp::lane() == 0) product.w_seen = right_of(product);
    if (product.a || Warp::lane() == 0) product.x_seen = left_of(product);
    own.open.push_back(std::move(product));
}

template <int COUNT>
void multiply(float (&c)[COUNT], uint64_t x, uint64_t w, int add) {
    ask({c, 2 * COUNT, x, nullptr, w, add != 0});
}
template <int COUNT>
void add_transposed(float (&c)[COUNT], const uint32_t (&a)[4], uint64_t w) {
    ask({c, 2 * COUNT, 0, a, w, true});
}

#define begin_products() (own_groups().fenced = true)
#define end_products() end_group()
inline void end_group() {
    Groups& own = own_groups();
    own.under_way.push_back(std::move(own.open)), own.open.clear(), own.fenced = false;
}

// Does product `i` of the first group of all threads of a warp.
inline void finish(const std::vector<Groups*>& all, size_t i) {
    auto of_thread = [&](int thread) -> Asked& { return all[thread]->under_way.front()[i]; };
    Asked& first = of_thread(0);
    int columns = first.columns;
    std::vector<float> w = right_of(first), x(256), sums(16 * columns);
    if (!same(w, first.w_seen)) fail("a factor in shared memory changed while its product was under way");
    for (int thread = 0; thread < 32; ++thread) {
        Asked& own = of_thread(thread);
        if (own.a || thread == 0) {
            std::vector<float> now = left_of(own);
            if (!same(now, own.x_seen)) fail("a first factor changed while its product was under way");
            if (!own.a) x = now;
            for (int j = 0; own.a && j < 8; ++j) x[(thread / 4 + j / 2 % 2 * 8) * 16 + thread % 4 * 2 + j % 2 + j / 4 * 8] = now[j];
        }
        std::vector<float> poison(own.count());
        memset(poison.data(), 0xFF, poison.size() * sizeof(float));
        if (own.first && memcmp(own.sums, poison.data(), poison.size() * sizeof(float))) fail("sums changed while their product was under way");
        for (int c = 0; c < own.count(); ++c) {
            float before = !own.add ? 0.0f : own.first ? own.before[c] : own.sums[c];
            sums[(thread / 4 + c / 2 % 2 * 8) * columns + c / 4 * 8 + thread % 4 * 2 + c % 2] = before;
        }
    }
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < columns; ++n) sums[m * columns + n] += x[m * 16 + k] * w[k * columns + n];
    for (int thread = 0; thread < 32; ++thread)
        for (int c = 0; c < first.count(); ++c)
            of_thread(thread).sums[c] = sums[(thread / 4 + c / 2 % 2 * 8) * columns + c / 4 * 8 + thread % 4 * 2 + c % 2];
}

// The first thread of the warp to be here again does the work of all.
template <int COUNT>
void wait_for_products_but() {
    std::vector<Groups*> all = Warp::exchange(PRODUCT, &own_groups());
    while (all[Warp::lane()]->under_way.size() > COUNT) {
        for (size_t i = 0; i < all[0]->under_way.front().size(); ++i) finish(all, i);
        for (Groups* thread : all) thread->under_way.pop_front();
    }
}

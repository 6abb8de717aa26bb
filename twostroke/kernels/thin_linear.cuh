// Linear layers for the few tokens of a decode step: out[t, n] = sum over k of x[t, k] * w[n, k], in bf16.
//
// Such products are as fast as their weights can be read, so everything here serves one thing: that reads never pause.
//   * One kernel does a chain of products, each the input of the next, so that weights of the next one are read while the
//     last tiles of this one are finished. One block on each multiprocessor has all of its shared memory, nearly all as a ring.
//   * Two blocks, a cluster, share a tile of rows of w: each sums over half of k, and sends its sums of half of the tokens to
//     the other's shared memory. No partial sum goes through global memory.
//   * In a block, one warp reads weights, one the input, four multiply, four apply the epilogue of one tile while the next is
//     multiplied.
//   * A tile waits for no more than it needs next: a product announces each tile that it has written, and the next one,
//     which goes through these columns as its k, multiplies with what is there. So all blocks of a chain have to run at once.
//   * By programmatic dependent launch a chain starts while the kernel before it ends, and reads its first weights before
//     it waits for its input.
//   * The sum of squares of the next norm, the residual, silu and the norm's scale are parts of the epilogue.
// Sums are added in a fixed order: results do not depend on timing.

#pragma once

#include "chain_finisher.cuh"
#include "hopper.cuh"
#include "product_chain.cuh"

namespace {

template <class S>
__device__ void read_weights(Shared<S>& s, const Chain& chain, int rank) {
    uint64_t policy = read_once_policy();
    Stage<S> stage;
    for (Tile tile(s.terms, chain.count, rank); tile.inside(); tile.advance()) {
        const CUtensorMap* w = &chain.products[tile.product].w;
        const Terms& a = tile.of();
        bool gated = a.epilogue == SILU;
        int rows = gated ? a.tile / 2 : a.tile, row = tile.index * rows;
        int bytes = HALVES * a.tile * BOX * 2, second = row + a.second_half;
        int k = tile.begin * SLICE;
#pragma unroll 1
        for (int slice = 0; slice < tile.slices; ++slice, stage.advance(), k += SLICE) {
            uint64_t* full = &s.full[stage.place];
            uint8_t* to = s.w[stage.place];
            stage.wait_for_place(s);
            expect(full, bytes);
#pragma unroll
            for (int half = 0; half < HALVES; ++half, to += S::W_HALF) {
                load_once(to, w, k + half * BOX, row, full, policy);
                if (gated) load_once(to + rows * BOX * 2, w, k + half * BOX, second, full, policy);
            }
        }
    }
}

// How much of a product's input is there. All threads of a warp take part.
struct Input {
    int product = -1;
    const int* ready;
    int columns, count, all;  // of a part, parts, columns of all
    int next, written;        // the first part that may be missing, and columns ahead of it

    __device__ void turn_to(const Tile& tile) {
        if (tile.product == product) return;
        product = tile.product;
        ready = tile.of().in_ready, columns = tile.of().in_columns, count = tile.of().in_count, all = tile.of().slices * SLICE;
        if (ready == nullptr) {
            wait_for_input();
            written = all;
            return;
        }
        next = tile.begin * SLICE / columns, written = next * columns;
    }
    // Until the columns of k ahead of `end` are there.
    __device__ __forceinline__ void wait_for(int end, int thread) {
        if (written >= end) return;
        while (written < end) {
            bool there = next + thread >= count || announced(ready + next + thread) == CLUSTER;
            uint32_t missing = ~__ballot_sync(~0u, there);
            next += missing == 0 ? 32 : __ffs(missing) - 1;
            written = next < count ? next * columns : all;
        }
        __syncwarp();
        fence_announced();
    }
};

template <class S>
__device__ void read_input(Shared<S>& s, const Chain& chain, int rank, int thread) {
    Stage<S> stage;
    Input input;
    for (Tile tile(s.terms, chain.count, rank); tile.inside(); tile.advance()) {
        input.turn_to(tile);
        const CUtensorMap* x = &chain.products[tile.product].x;
        int k = tile.begin * SLICE;
#pragma unroll 1
        for (int slice = 0; slice < tile.slices; ++slice, stage.advance(), k += SLICE) {
            uint64_t* full = &s.full[stage.place];
            stage.wait_for_place(s);
            input.wait_for(k + SLICE, thread);
            if (thread == 0) {
                expect(full, S::X_BYTES);
#pragma unroll
                for (int half = 0; half < HALVES; ++half) load_input(s.x[stage.place] + half * S::X_HALF, x, k + half * BOX, full);
            }
            __syncwarp();
        }
    }
    // Never before the kernel ahead is done: one that starts early may rely on all but its predecessor being so.
    wait_for_input();
    let_next_start();
}

template <class S>
__device__ void multiply_tiles(Shared<S>& s, const Chain& chain, int rank, int warp, int lane) {
    // This warp has the sums of 16 tokens, which one block of the cluster finishes.
    int owner = warp * 16 / S::SHARE, eight = warp * 16 % S::SHARE / 8;
    bool wanted = warp * 16 < S::TOKENS;
    const float* received = s.received + (rank * S::SHARE / 8 + eight) * S::BOXES * S::ROW + lane * 4;
    uint32_t to = address_in(address(received), wanted ? owner : 0), barrier = address_in(address(&s.sums_here), wanted ? owner : 0);
    Stage<S> stage;
    for (Tile tile(s.terms, chain.count, rank); tile.inside(); tile.advance()) {
        float c[TILE / 2];
#pragma unroll 1
        for (int slice = 0; slice < tile.slices; ++slice, stage.advance()) {
            wait_for(&s.full[stage.place], stage.turn);
            __syncwarp();  // lanes may leave the wait one by one, and the next instructions are the warp's
            uint64_t x = describe(s.x[stage.place]), w = describe(s.w[stage.place]);
            begin_products();
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
#pragma unroll
                for (int k = 0; k < BOX / 16; ++k)
                    multiply(c, x + half * (S::X_HALF >> 4) + k * 2, w + half * (S::W_HALF >> 4) + k * 2, slice + half + k);
            end_products();
            wait_for_products();
            if (lane == 0) arrive(&s.empty[stage.place]);
        }
        // All blocks have read the sums of the tile before.
        if (tile.number > 0) wait_for(&s.sums_read, (tile.number - 1) & 1);
        if (!wanted) {
            arrive(&s.sums_read);  // whoever waits for a phase is one that the next one needs: none is missed
            continue;
        }
#pragma unroll
        for (int box = 0; box < S::BOXES; ++box) {
            const float* sums = c + 8 * box;
            send(to + 4 * S::ROW * box, sums[0], sums[1], sums[4], sums[5], barrier);
            send(to + 4 * S::ROW * (S::BOXES + box), sums[2], sums[3], sums[6], sums[7], barrier);
        }
    }
}

template <class S>
__global__ void __launch_bounds__(THREADS, 1) thin_linear(const __grid_constant__ Chain chain) {
    static_assert(sizeof(Shared<S>) + 1024 <= SHARED_BYTES);
    DYNAMIC_SHARED(raw);
    // The same offset in every block of a cluster, since dynamic shared memory starts at the same place in all.
    Shared<S>& s = *reinterpret_cast<Shared<S>*>(raw + (1024 - address(raw) % 1024) % 1024);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = rank_in_cluster();
    constexpr int WORDS = sizeof(Terms) / 4;
    for (int i = threadIdx.x; i < MOST_PRODUCTS * WORDS; i += THREADS)
        reinterpret_cast<uint32_t*>(s.terms)[i] = reinterpret_cast<const uint32_t*>(&chain.products[i / WORDS].terms)[i % WORDS];
    if (warp >= MULTIPLIERS + FINISHERS && lane < MOST_PRODUCTS)
        expect_map(warp == MULTIPLIERS + FINISHERS ? &chain.products[lane].w : &chain.products[lane].x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) prepare(&s.full[i], READERS), prepare(&s.empty[i], MULTIPLIERS);
        prepare(&s.sums_here, 1), prepare(&s.sums_read, CLUSTER + 32 * S::WITHOUT_SUMS);
        fence_prepared();
        expect(&s.sums_here, 4 * CLUSTER * S::SHARE * TILE);
        fence_async();
    }
    __syncthreads();
    meet_cluster();
    if (warp < MULTIPLIERS)
        multiply_tiles<S>(s, chain, rank, warp, lane);
    else if (warp < MULTIPLIERS + FINISHERS)
        finish_tiles<S>(s, chain, rank, threadIdx.x - 32 * MULTIPLIERS);
    else if (warp == MULTIPLIERS + FINISHERS && lane == 0)
        read_weights<S>(s, chain, rank);
    else if (warp == MULTIPLIERS + FINISHERS + 1)
        read_input<S>(s, chain, rank, lane);
    leave_cluster();
}

}  // namespace

// A chain of products, and what the blocks of its kernel share: tiles, a ring of stages, received sums.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "hopper.cuh"

namespace {

constexpr int CLUSTER = 2;  // blocks that share a tile
constexpr int TILE = 64;    // most rows of w
constexpr int BOX = 64;     // of k, that are read at once
constexpr int HALVES = 2;   // boxes of k in a stage
constexpr int SLICE = HALVES * BOX;
constexpr int MULTIPLIERS = 4, FINISHERS = 4, READERS = 2;  // warps
constexpr int THREADS = 32 * (MULTIPLIERS + FINISHERS + READERS);
constexpr int MOST_PRODUCTS = 4;
constexpr int SHARED_BYTES = 227 * 1024;

enum Epilogue { SCALE = 0, RESIDUAL = 1, SILU = 2 };

// A product without its matrices. Blocks keep it in their shared memory: what a kernel is given lies far from a warp that asks
// for it by address.
struct Terms {
    int epilogue, tile, tiles, slices, tokens, rows, out_stride;  // tile: rows of w in one, at most TILE
    int second_half;                // SILU: first row of the up projection
    int in_parts;
    float in_mean_factor, eps;
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

struct Product {
    CUtensorMap w, x;
    Terms terms;
};

struct Chain {
    alignas(128) Product products[MOST_PRODUCTS];  // as some versions of CUDA ask for, and all allow
    int count;
};

template <int TOKENS_>
struct Shape {
    static constexpr int TOKENS = TOKENS_;
    static constexpr int SHARE = TOKENS / CLUSTER;  // tokens that a block finishes
    static constexpr int WITHOUT_SUMS = MULTIPLIERS - TOKENS / 16;  // warps, of those that multiply
    static constexpr int BOXES = TILE / 16;         // of received sums, 8 tokens x 16 rows
    static constexpr int ROW = 128 + 4;             // numbers of such a box, padded
    static constexpr int RECEIVED = CLUSTER * SHARE / 8 * BOXES * ROW;
    static constexpr int W_HALF = TILE * BOX * 2, X_HALF = TOKENS * BOX * 2;  // bytes
    static constexpr int W_BYTES = HALVES * W_HALF, X_BYTES = HALVES * X_HALF;
    static constexpr int STAGES = (SHARED_BYTES - 2048 - 4 * RECEIVED) / (W_BYTES + X_BYTES);
    static constexpr int GROUP = TILE / 8;  // threads that finish a token
    static constexpr int PER_PASS = 32 * FINISHERS / GROUP, PASSES = SHARE / PER_PASS;
};

template <class S>
struct Shared {
    uint8_t w[S::STAGES][S::W_BYTES];
    // The matrix unit always reads 64 tokens, into what lies behind; what it makes of that is never looked at.
    uint8_t x[S::STAGES][S::X_BYTES];
    float received[S::RECEIVED];  // [CLUSTER, SHARE / 8, BOXES, ROW]; in a box: [lane, 4] as a multiplier holds them
    uint64_t full[S::STAGES], empty[S::STAGES];
    uint64_t sums_here, sums_read;
    Terms terms[MOST_PRODUCTS];
};

// The tiles of a cluster, one after the other: of each product, those whose number is the cluster's, modulo clusters.
struct Tile {
    const Terms* terms;  // of all products
    int count, rank, clusters, first;
    int product = 0, index;  // of the chain's products, of the product's tiles
    int begin, slices;       // of the product's slices of k, those of this block
    int number = 0;          // among the cluster's

    __device__ Tile(const Terms* terms, int count, int rank)
        : terms(terms), count(count), rank(rank), clusters(gridDim.x / CLUSTER), first(blockIdx.x / CLUSTER) {
        begin_product();
    }
    __device__ bool inside() const { return product < count; }
    __device__ const Terms& of() const { return terms[product]; }
    __device__ void advance() {
        ++number, index += clusters;
        if (index >= of().tiles) ++product, begin_product();
    }
    __device__ void begin_product() {
        index = first;
        while (inside() && index >= of().tiles) ++product;
        if (!inside()) return;
        begin = rank * of().slices / CLUSTER;
        slices = (rank + 1) * of().slices / CLUSTER - begin;
    }
};

// A place in the ring. Whoever reads for one must be quick, so nothing is divided.
template <class S>
struct Stage {
    int place = 0, turn = 0;

    __device__ void advance() {
        if (++place == S::STAGES) place = 0, turn ^= 1;
    }
    // Until what the stage before in its place had there was multiplied; there was none in the first turn.
    __device__ void wait_for_place(Shared<S>& s) const { wait_for(&s.empty[place], turn ^ 1); }
};

}  // namespace

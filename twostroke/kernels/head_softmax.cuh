// One warp's softmax over positions that come 16 at a time, for up to 8 query heads of one kv head, in bf16.

#pragma once

#include <cuda_bf16.h>
#include <math.h>
#include <stdint.h>

#include "hopper.cuh"
#include "pairs.cuh"
#include "warp_products.cuh"

namespace {

constexpr int UNIT = 16;    // positions
constexpr int QUERIES = 8;  // query heads of a kv head, at most
constexpr float NOTHING = -INFINITY;

// A thread's part of a head as the second factor of a product: the numbers 2 t, 2 t + 1 of every 8, where t = thread % 4.
template <int DIM>
struct Head {
    static constexpr int PAIRS = DIM / 8;
    uint32_t pair[PAIRS];

    static __device__ __forceinline__ int first(int i, int thread) { return i * 8 + thread % 4 * 2; }

    __device__ __forceinline__ void load(const __nv_bfloat16* from, int thread) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) pair[i] = load_pair(from + first(i, thread));
    }

    // Rounded as transformers rounds it.
    __device__ __forceinline__ void norm(const __nv_bfloat16* weight, float eps, int thread) {
        float2 products = times(*this);
        int own = thread / 4;
        float squares = __shfl_sync(~0u, own % 2 ? products.y : products.x, own * 4 + own / 2);
        float inverse = rsqrtf(squares / DIM + eps);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            float2 x = numbers(pair[i]);
            pair[i] = product(rounded({x.x * inverse, x.y * inverse}), load_pair(weight + first(i, thread)));
        }
    }

    // Partners in a rotation, DIM / 2 apart, are in the same thread.
    __device__ __forceinline__ void rotate(const float2 (&cosines)[PAIRS / 2], const float2 (&sines)[PAIRS / 2]) {
#pragma unroll
        for (int i = 0; i < PAIRS / 2; ++i) {
            float2 low = numbers(pair[i]), high = numbers(pair[i + PAIRS / 2]), c = cosines[i], s = sines[i];
            pair[i] = rounded({low.x * c.x - high.x * s.x, low.y * c.y - high.y * s.y});
            pair[i + PAIRS / 2] = rounded({high.x * c.x + low.x * s.x, high.y * c.y + low.y * s.y});
        }
    }

    // Products of this warp's heads with those of another: of head thread / 4 with the others' 2 t and 2 t + 1.
    __device__ __forceinline__ float2 times(const Head& others) const {
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int i = 0; i < PAIRS / 2; ++i) {
            uint32_t rows[4] = {pair[2 * i], 0, pair[2 * i + 1], 0};
            multiply_16x8(i % 2 ? odd : even, rows, others.pair[2 * i], others.pair[2 * i + 1]);
        }
        return {even[0] + odd[0], even[1] + odd[1]};
    }
};

// Where a thread finds its rows of a unit's matrices: the numbers of a position lie in lines of 128 bytes, whose chunks of 16
// bytes are swizzled.
template <int DIM>
struct Places {
    static constexpr int LINES = DIM / 64;
    uint32_t key[LINES], value[LINES];

    __device__ __forceinline__ explicit Places(int thread) {
#pragma unroll
        for (int line = 0; line < LINES; ++line)
            key[line] = place(thread % 16, line, thread / 16), value[line] = place(thread % 8 + thread / 16 * 8, line, thread / 8 % 2);
    }
    static __device__ __forceinline__ uint32_t place(int position, int line, int chunk) {
        line += position * LINES;
        return line * 128 + (chunk ^ line % 8) * 16;
    }
    // The place of the numbers 16 i and on, of a unit.
    static __device__ __forceinline__ uint32_t at(const uint8_t* unit, const uint32_t (&own)[LINES], int i) {
        return (address(unit) + own[i / 4]) ^ i % 4 * 32;
    }
};

// The softmax so far. A thread has the numbers g, g + 8 of every 16 of a head (g = thread / 4), of the query heads 2 t, 2 t + 1.
template <int DIM>
struct Softmax {
    static constexpr int STEPS = DIM / 16;
    float top[2], total[2];  // a thread's totals are over the positions g, g + 8 of every unit
    float result[STEPS][4];  // numbers g, g, g + 8, g + 8 of the query heads 2 t, 2 t + 1, 2 t, 2 t + 1

    // A thread's part of a position's value.
    struct Value {
        __nv_bfloat16 number[STEPS][2];

        __device__ __forceinline__ void load(const __nv_bfloat16* from, int thread) {
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) number[i][half] = from[i * 16 + half * 8 + thread / 4];
        }
    };

    // Over the newest position alone, of which a thread has the scores of the query heads 2 t, 2 t + 1; or over nothing.
    __device__ __forceinline__ void begin(const Value& value, float2 score, bool newest, int thread) {
        top[0] = newest ? score.x : NOTHING, top[1] = newest ? score.y : NOTHING;
        total[0] = total[1] = newest && thread < 4 ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                result[i][2 * half] = result[i][2 * half + 1] = newest ? __bfloat162float(value.number[i][half]) : 0.0f;
    }

    // Takes in a unit, of which the positions from `low` to `high` are seen. What comes from shared memory is asked for ahead
    // of what it is needed for.
    __device__ __forceinline__ void take(const Head<DIM>& q, float scale, const uint8_t* keys, uint8_t* values,
                                         const Places<DIM>& places, int low, int high, int thread) {
        bool whole = low <= 0 && high >= UNIT;
        uint32_t k[STEPS][4], v[STEPS][4];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) load_matrices(k[i], places.at(keys, places.key, i));
        if (!whole) clear(values, low, high, thread);
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) load_matrices_transposed(v[i], places.at(values, places.value, i));
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i) multiply_16x8(i % 2 ? odd : even, k[i], q.pair[2 * i], q.pair[2 * i + 1]);
#pragma unroll
        for (int i = STEPS / 2; i < STEPS; ++i) load_matrices_transposed(v[i], places.at(values, places.value, i));
        float score[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int position = thread / 4 + j / 2 * 8;
            score[j] = whole || (position >= low && position < high) ? (even[j] + odd[j]) * scale : NOTHING;
        }
        float best[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
        if (__any_sync(~0u, best[0] > top[0] || best[1] > top[1])) raise(best);
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[j] = power_of_2(score[j] - top[j % 2]);
        total[0] += weight[0] + weight[2], total[1] += weight[1] + weight[3];
        uint32_t first = transposed(rounded({weight[0], weight[1]})), second = transposed(rounded({weight[2], weight[3]}));
#pragma unroll
        for (int i = 0; i < STEPS; ++i) multiply_16x8(result[i], v[i], first, second);
    }

    // Lets `top` be the largest score of all positions so far.
    __device__ __forceinline__ void raise(const float (&best)[2]) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float now = best[j];
#pragma unroll
            for (int far = 4; far < 32; far *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, far));
            now = fmaxf(now, top[j]);
            float decay = now == NOTHING ? 1.0f : power_of_2(top[j] - now);
            top[j] = now, total[j] *= decay;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) result[i][j] *= decay, result[i][j + 2] *= decay;
        }
    }

    // Positions that nobody sees may hold the NaN of an earlier owner, which a weight of zero does not hide.
    static __device__ void clear(uint8_t* values, int low, int high, int thread) {
        for (int position = 0; position < UNIT; ++position)
            if (position < low || position >= high)
                for (int at = thread * 4; at < DIM * 2; at += 128) *reinterpret_cast<uint32_t*>(values + position * DIM * 2 + at) = 0;
        fence_async();  // the place is written by the accelerator next
        __syncwarp();
    }

    // 0 if `zero` is, once all that was read from shared memory has come: products wait for it.
    __device__ __forceinline__ int after_reads(int zero) const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) bits |= __float_as_uint(result[i][0]);
        return bits & zero;
    }

    // Ends it: totals are those of all positions, results the weighted mean of the values; over nothing, zeros.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int far = 4; far < 32; far *= 2) total[j] += __shfl_xor_sync(~0u, total[j], far);
            float factor = total[j] == 0.0f ? 0.0f : 1.0f / total[j];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) result[i][j] *= factor, result[i][j + 2] *= factor;
        }
    }

    // Writes the heads [group, DIM].
    __device__ __forceinline__ void write(__nv_bfloat16* out, int group, int thread) const {
        int query = thread / 4;
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t pair = transposed(rounded({result[i][2 * half], result[i][2 * half + 1]}));
                if (query < group) *reinterpret_cast<uint32_t*>(out + query * DIM + i * 16 + half * 8 + thread % 4 * 2) = pair;
            }
    }

    // Writes the heads [group, DIM] in float, and the logarithms of their totals.
    __device__ __forceinline__ void write_part(float* partial, float* log_sum, int group, int thread) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int query = thread % 4 * 2 + j;
            if (query >= group) continue;
            float* to = partial + query * DIM + thread / 4;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) to[i * 16] = result[i][j], to[i * 16 + 8] = result[i][j + 2];
            if (thread < 4) log_sum[query] = top[j] + log2f(total[j]);
        }
    }
};

}  // namespace

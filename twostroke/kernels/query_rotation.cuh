// The norm and the rotation of queries that lie in shared memory: rows of a head's numbers, in lines of 128 bytes whose chunks
// of 16 bytes are swizzled, a line of all rows behind the other.

#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "pairs.cuh"

namespace {

struct Rotation {
    const float *cosines, *sines;  // [tokens, DIM / 2], at multiples of 16 bytes; null: queries are as they shall be
    const __nv_bfloat16* weight;   // [DIM] of a norm before the rotation; null: none
    float eps;                     // of the norm
};

// A thread has four neighbours of a row, and their partners, DIM / 2 behind.
template <int DIM>
struct RowRotation {
    static constexpr int THREADS_PER_ROW = DIM / 8, ROWS_AT_ONCE = 32 / THREADS_PER_ROW;

    const Rotation& a;
    uint32_t own;  // the first of a thread's numbers in its row
    uint2 low_weights{}, high_weights{};

    __device__ RowRotation(const Rotation& a, int thread) : a(a), own(thread % THREADS_PER_ROW * 4) {
        if (a.weight == nullptr) return;
        low_weights = *reinterpret_cast<const uint2*>(a.weight + own);
        high_weights = *reinterpret_cast<const uint2*>(a.weight + DIM / 2 + own);
    }

    static __device__ __forceinline__ float squares(uint2 pairs) {
        float2 x = numbers(pairs.x), y = numbers(pairs.y);
        return x.x * x.x + x.y * x.y + (y.x * y.x + y.y * y.y);
    }

    static __device__ __forceinline__ uint2 normed(uint2 pairs, float inverse, uint2 weights) {
        float2 x = numbers(pairs.x), y = numbers(pairs.y);
        return {product(rounded({x.x * inverse, x.y * inverse}), weights.x), product(rounded({y.x * inverse, y.y * inverse}), weights.y)};
    }

    // Rounded as transformers rounds it.
    template <int ROWS>
    __device__ __forceinline__ void norm(uint2 (&low)[ROWS], uint2 (&high)[ROWS]) const {
        float sum[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sum[i] = squares(low[i]) + squares(high[i]);
#pragma unroll
        for (int far = 1; far < THREADS_PER_ROW; far *= 2)
#pragma unroll
            for (int i = 0; i < ROWS; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], far);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float inverse = rsqrtf(sum[i] / DIM + a.eps);
            low[i] = normed(low[i], inverse, low_weights), high[i] = normed(high[i], inverse, high_weights);
        }
    }

    static __device__ __forceinline__ void turn(uint32_t& low, uint32_t& high, float2 cosine, float2 sine) {
        float2 x = numbers(low), y = numbers(high);
        low = rounded({x.x * cosine.x - y.x * sine.x, x.y * cosine.y - y.y * sine.y});
        high = rounded({y.x * cosine.x + x.x * sine.x, y.y * cosine.y + x.y * sine.y});
    }

    // Does rows of a token, each thread its part of them; if they are not in use nothing is written. All places are addresses in
    // shared memory: of the first line, and of the token's angles.
    template <int ROWS>
    __device__ __forceinline__ void rotate(uint32_t lines, uint32_t line_bytes, const uint32_t (&row)[ROWS], uint32_t cosines,
                                           uint32_t sines, bool in_use) const {
        constexpr uint32_t PARTNER = DIM % 128 ? DIM : 0;  // bytes, in the same line
        const uint32_t partner = DIM / 128 * line_bytes;   // and in lines behind it
        uint32_t at[ROWS];
        uint2 low[ROWS], high[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            at[i] = lines + row[i] * 128 + (own / 8 ^ row[i] % 8) * 16 + own % 8 * 2;
            load_shared(low[i], at[i]), load_shared(high[i], (at[i] ^ PARTNER) + partner);
        }
        if (a.weight != nullptr) norm(low, high);
        float4 cosine, sine;
        load_shared(cosine, cosines + own * 4), load_shared(sine, sines + own * 4);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            turn(low[i].x, high[i].x, {cosine.x, cosine.y}, {sine.x, sine.y});
            turn(low[i].y, high[i].y, {cosine.z, cosine.w}, {sine.z, sine.w});
            if (in_use) store_shared(at[i], low[i]), store_shared((at[i] ^ PARTNER) + partner, high[i]);
        }
    }
};

}  // namespace

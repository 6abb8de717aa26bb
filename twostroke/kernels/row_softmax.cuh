// The softmax of 64 rows of queries over positions that come 128 at a time, by a warp group, in bf16. A thread has two rows
// of its warp's sixteen: g and g + 8, where g = thread / 4 of its warp; of their columns the pairs 2 t, 2 t + 1 of every eight,
// where t = thread % 4. That is how products give their sums. A sequence's last positions may fill half of a tile only.

#pragma once

#include <cuda_bf16.h>
#include <math.h>
#include <stdint.h>

#include "pairs.cuh"
#include "warp_products.cuh"

namespace {

constexpr int ROWS = 64;        // of a warp group
constexpr int POSITIONS = 128;  // of a tile of keys and values

template <int DIM>
struct RowSoftmax {
    float top[2], total[2];  // a thread's totals are over its own columns
    float result[DIM / 2];
    float score[POSITIONS / 2];         // then, weights
    uint32_t weight[POSITIONS / 16][4];  // rounded, as the first factor of a product

    template <int COLUMNS>
    __device__ __forceinline__ float (&scores())[COLUMNS / 2] {
        return reinterpret_cast<float(&)[COLUMNS / 2]>(score);
    }

    __device__ __forceinline__ void begin() {
        top[0] = top[1] = -INFINITY, total[0] = total[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) result[i] = 0.0f;
    }

    // Hides what lies behind the first `seen` positions of the tile, for either row. Position 0 of a sequence never does: a row
    // sees something from its first tile on.
    template <int COLUMNS>
    __device__ __forceinline__ void hide(int seen, int seen_below, int thread) {
        seen -= thread % 4 * 2, seen_below -= thread % 4 * 2;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i)
            if (i / 4 * 8 + i % 2 >= (i / 2 % 2 ? seen_below : seen)) score[i] = -INFINITY;
    }

    // Turns scores into weights; returns by what earlier results are to be multiplied, of either row.
    template <int COLUMNS>
    __device__ __forceinline__ float2 weigh(float scale) {
        float best[2] = {top[0], top[1]}, decay[2], sum[2] = {};
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], score[i]);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            best[row] = fmaxf(best[row], __shfl_xor_sync(~0u, best[row], 1));
            best[row] = fmaxf(best[row], __shfl_xor_sync(~0u, best[row], 2));
            decay[row] = power_of_2((top[row] - best[row]) * scale);
            top[row] = best[row], best[row] *= scale;
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) {
            score[i] = power_of_2(score[i] * scale - best[i / 2 % 2]);
            sum[i / 2 % 2] += score[i];
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) total[row] = total[row] * decay[row] + sum[row];
        return {decay[0], decay[1]};
    }

    template <int COLUMNS>
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 2) weight[i / 8][i / 2 % 4] = rounded({score[i], score[i + 1]});
    }

    __device__ __forceinline__ void scale_result(float2 by) {
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) result[i] *= i / 2 % 2 ? by.y : by.x;
    }

    // Divides by the totals. Of nothing, the mean is zero.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            total[row] += __shfl_xor_sync(~0u, total[row], 1);
            total[row] += __shfl_xor_sync(~0u, total[row], 2);
        }
        scale_result({total[0] == 0.0f ? 0.0f : 1.0f / total[0], total[1] == 0.0f ? 0.0f : 1.0f / total[1]});
    }

    // Writes one of the rows; null: nobody reads it. The four threads of a row exchange, so that each has eight neighbours.
    __device__ __forceinline__ void write(__nv_bfloat16* out, int row, int thread) const {
        bool odd = thread & 1, upper = thread & 2;
#pragma unroll
        for (int first = 0; first < DIM; first += 32) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* numbers = result + (first / 8 + i) * 4 + row * 2;
                pair[i] = rounded({numbers[0], numbers[1]});
            }
            exchange(pair[0], pair[1], odd, 1), exchange(pair[2], pair[3], odd, 1);
            exchange(pair[0], pair[2], upper, 2), exchange(pair[1], pair[3], upper, 2);
            uint4 eight{pair[0], pair[1], pair[2], pair[3]};
            if (out != nullptr) *reinterpret_cast<uint4*>(out + first + thread % 4 * 8) = eight;
        }
    }

private:
    static __device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, bool has_high, int far) {
        uint32_t other = __shfl_xor_sync(~0u, has_high ? low : high, far);
        low = has_high ? other : low, high = has_high ? high : other;
    }
};

}  // namespace

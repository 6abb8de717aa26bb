// Pairs of bf16 numbers in a word.

#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace {

__device__ __forceinline__ float2 numbers(uint32_t pair) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

__device__ __forceinline__ uint32_t rounded(float2 pair) {
    __nv_bfloat162 both = __floats2bfloat162_rn(pair.x, pair.y);
    return *reinterpret_cast<const uint32_t*>(&both);
}

// The products of two pairs, rounded.
__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
    __nv_bfloat162 both = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ uint32_t load_pair(const __nv_bfloat16* from) { return *reinterpret_cast<const uint32_t*>(from); }

}  // namespace

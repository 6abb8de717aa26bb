#pragma once

#include "warp.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits = __float_as_uint(value);
    if (value != value) return {0x7FFF};
    return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(__bfloat162float(a.x) * __bfloat162float(b.x), __bfloat162float(a.y) * __bfloat162float(b.y));
}

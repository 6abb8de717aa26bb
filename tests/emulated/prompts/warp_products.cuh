// `twostroke/kernels/warp_products.cuh`, as far as `streamed_prefill.cuh` uses it.

#pragma once

#include <math.h>

inline float power_of_2(float exponent) { return exp2f(exponent); }

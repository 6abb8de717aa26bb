// `twostroke/kernels/warp_products.cuh`, with fragments as the PTX manual draws them.

#pragma once

#include "cuda_bf16.h"
#include "hopper.cuh"

inline const unsigned char* row_of(const std::vector<uint32_t>& rows, int matrix, int row) {
    return shared_memory + rows[8 * matrix + row];
}

inline void load_matrices(uint32_t (&to)[4], uint32_t from) {
    std::vector<uint32_t> rows = Warp::exchange(MATRICES, from);
    int thread = Warp::lane();
    for (int matrix = 0; matrix < 4; ++matrix) memcpy(&to[matrix], row_of(rows, matrix, thread / 4) + thread % 4 * 4, 4);
}

inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t from) {
    std::vector<uint32_t> rows = Warp::exchange(MATRICES_TRANSPOSED, from);
    int thread = Warp::lane();
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) memcpy(&pair[i], row_of(rows, matrix, thread % 4 * 2 + i) + thread / 4 * 2, 2);
        memcpy(&to[matrix], pair, 4);
    }
}

inline uint16_t half_of(uint32_t pair, int which) { return which ? pair >> 16 : pair & 0xFFFF; }

inline uint32_t transposed(uint32_t pair) {
    std::vector<uint32_t> all = Warp::exchange(TRANSPOSED, pair);
    int row = Warp::lane() / 4, column = Warp::lane() % 4 * 2;
    auto number = [&](int r, int c) { return half_of(all[r * 4 + c / 2], c % 2); };
    return number(column, row) | uint32_t(number(column + 1, row)) << 16;
}

struct Factors {
    uint32_t a[4], b[2];
};

inline void multiply_16x8(float (&sum)[4], const uint32_t (&a)[4], uint32_t first, uint32_t second) {
    std::vector<Factors> all = Warp::exchange(PRODUCT, Factors{{a[0], a[1], a[2], a[3]}, {first, second}});
    auto number = [](uint32_t pair, int which) { return __bfloat162float({half_of(pair, which)}); };
    auto left = [&](int m, int k) { return number(all[m % 8 * 4 + k % 8 / 2].a[m / 8 + k / 8 * 2], k % 2); };
    auto right = [&](int k, int n) { return number(all[n * 4 + k % 8 / 2].b[k / 8], k % 2); };
    int thread = Warp::lane();
    for (int j = 0; j < 4; ++j) {
        int m = thread / 4 + j / 2 * 8, n = thread % 4 * 2 + j % 2;
        for (int k = 0; k < 16; ++k) sum[j] += left(m, k) * right(k, n);
    }
}

inline float power_of_2(float exponent) { return exp2f(exponent); }

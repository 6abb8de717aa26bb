#pragma once

#include <stdint.h>

// A bf16 matrix, row-major, read in boxes of box_rows x 64.
struct alignas(128) CUtensorMap {
    const unsigned char* data;
    uint64_t rows, columns;
    uint32_t box_rows;
    char unused[92];
};
static_assert(sizeof(CUtensorMap) == 128);

#pragma once

#include <stdint.h>
#include <string.h>

// A bf16 matrix, row-major, read in boxes of box_rows x 64.
struct alignas(128) CUtensorMap {
    const unsigned char* data;
    uint64_t rows, columns;
    uint32_t box_rows;
    char unused[92];
};
static_assert(sizeof(CUtensorMap) == 128);

// Writes a box where the tensor memory accelerator would, swizzled by 128 bytes. Rows and columns outside of the matrix are zero.
inline void write_box(unsigned char* to, const CUtensorMap* map, uint64_t column, uint64_t row) {
    memset(to, 0, map->box_rows * 128);
    for (uint32_t i = 0; i < map->box_rows && row + i < map->rows; ++i)
        for (uint32_t chunk = 0; chunk < 8 && column + chunk * 8 < map->columns; ++chunk)
            memcpy(to + i * 128 + (chunk ^ i % 8) * 16, map->data + ((row + i) * map->columns + column + chunk * 8) * 2, 16);
}

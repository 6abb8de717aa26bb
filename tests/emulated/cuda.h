#pragma once

#include <stdint.h>

// A matrix of lines of 128 bytes, read `box_lines` at a time.
struct alignas(128) CUtensorMap {
    const unsigned char* data;
    uint64_t lines;
    uint32_t box_lines;
    char unused[104];
};
static_assert(sizeof(CUtensorMap) == 128);

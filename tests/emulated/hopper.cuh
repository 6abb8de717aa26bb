// `twostroke/kernels/hopper.cuh`, as far as `streamed_decode.cuh` uses it. Copies of the tensor memory accelerator are done when
// they are asked for, as early as they may be: whoever asks for a place before it was read, reads wrong numbers.

#pragma once

#include "cuda.h"
#include "warp.h"

template <class T>
T* kept(T* pointer) {
    return pointer;
}

// A barrier: phases that have ended, and bytes that the present one waits for.
struct Barrier {
    uint32_t ended;
    int32_t bytes;
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));
inline Barrier& of(uint64_t* barrier) { return *reinterpret_cast<Barrier*>(barrier); }

inline void prepare(uint64_t* barrier, int) { of(barrier) = {0, 0}; }
inline void fence_prepared() {}
inline void fence_async() {}
inline void expect(uint64_t* barrier, int bytes) {
    if (of(barrier).bytes) fail("a barrier is used for a phase before the one ahead has ended");
    of(barrier).bytes = bytes;
}
inline void wait_for(uint64_t* barrier, uint32_t parity) {
    if ((of(barrier).ended & 1) == parity) fail("a wait for what nobody asked for");
}

// What the kernel ahead does last.
struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};
inline std::vector<Copy> input;
inline bool has_input;

inline void wait_for_input() {
    for (const Copy& copy : input) memcpy(copy.to, copy.from, copy.bytes);
    input.clear(), has_input = true;
}
inline void let_next_start() {
    if (!has_input) fail("one that starts early relies on all but its predecessor being done");
}
inline int join(int* count) { return (*count)++; }
inline int count_up(int* count) { return (*count)++; }
inline uint64_t read_once_policy() { return 0; }

inline void load_once(void* to, const CUtensorMap* map, int column, int line, uint64_t* barrier, uint64_t) {
    if (column != 0 || line < 0 || line + map->box_rows > map->rows) fail("a box outside of its matrix");
    if (address(to) % 1024) fail("a box that is not aligned to the pattern of its swizzle");
    write_box(static_cast<unsigned char*>(to), map, column, line);
    Barrier& own = of(barrier);
    own.bytes -= map->box_rows * 128;
    if (own.bytes < 0) fail("more bytes than were expected");
    if (own.bytes == 0) ++own.ended;
}

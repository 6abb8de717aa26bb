// A warp on the CPU: its 32 threads are fibers that run in turn, each until it waits: for the rest of its warp at an
// instruction of the whole warp, or for others. What CUDA C++ sources use of the language is defined here as the PTX manual
// defines it; `hopper.cuh` and `warp_products.cuh` have twins beside this file.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __maxnreg__(registers)
#define __launch_bounds__(threads, blocks)

using std::max;
using std::min;

struct Index {
    int x;
};
inline Index threadIdx, blockIdx, gridDim;
inline unsigned char* shared_memory;  // of the block whose warp runs; its beginning has the address 0

inline uint32_t address(const void* pointer) { return static_cast<const unsigned char*>(pointer) - shared_memory; }

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline bool say(const char* what) {
    fprintf(stderr, "emulated warp: %s\n", what);
    return false;
}

// What a thread waits for.
struct Wait {
    const char* what;
    uint32_t place;  // in shared memory, or 0
    std::function<bool()> over;
};

class Warp {
public:
    // Makes the threads 32 warp to 32 warp + 31 of a block. They do not run yet.
    Warp(int warp, const std::function<void()>& work) : first(32 * warp), work(work), stacks(new char[32 * STACK]) {
        for (int i = 0; i < 32; ++i) {
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = &stacks[i * STACK], fibers[i].uc_stack.ss_size = STACK;
            fibers[i].uc_link = &scheduler;
            makecontext(&fibers[i], begin, 0);
            waits[i] = {"its first turn", 0, [] { return true; }};
        }
    }

    // Runs `count` warps of a block from `first` on in turn, each up to its next wait; they wait for nobody but themselves.
    // Returns whether nothing failed.
    static bool run(int first, int count, const std::function<void()>& work) {
        failed = false;
        std::vector<std::unique_ptr<Warp>> left;
        for (int warp = first; warp < first + count; ++warp) left.push_back(std::make_unique<Warp>(warp, work));
        auto has_ended = [](const std::unique_ptr<Warp>& warp) { return warp->ended(); };
        while (!left.empty()) {
            for (auto& warp : left)
                if (!warp->step()) return failed ? false : say("some threads have ended, others wait for them");
            left.erase(std::remove_if(left.begin(), left.end(), has_ended), left.end());
        }
        return true;
    }

    // Runs each thread up to its next wait, if its last one is over. Returns whether any ran and nothing failed.
    bool step() {
        now = this;
        bool ran = false;
        for (thread = 0; thread < 32; ++thread) {
            if (done[thread] || !waits[thread].over()) continue;
            ran = true, threadIdx.x = first + thread;
            swapcontext(&scheduler, &fibers[thread]);
            if (failed) break;
        }
        now = nullptr;
        return ran && !failed && gather();
    }

    bool ended() const { return std::all_of(done, done + 32, [](bool one) { return one; }); }

    // What those of its threads wait for that have not ended.
    std::vector<const Wait*> open() const {
        std::vector<const Wait*> all;
        for (int i = 0; i < 32; ++i)
            if (!done[i]) all.push_back(&waits[i]);
        return all;
    }

    // The present thread waits; all others may run before it goes on, even if it need not wait.
    static void wait_until(Wait wait) {
        Warp& warp = *now;
        int thread = warp.thread;
        warp.waits[thread] = std::move(wait);
        swapcontext(&warp.fibers[thread], &warp.scheduler);
    }

    // All threads give `value` and get what all gave. `kind` tells instructions apart: a warp must not be at several.
    template <class Value>
    static std::vector<Value> exchange(int kind, const Value& value) {
        static_assert(sizeof(Value) <= sizeof(Slot::bytes));
        Warp& warp = *now;
        Slot& slot = warp.slots[warp.thread];
        slot.kind = kind, slot.arrived = true;
        memcpy(slot.bytes, &value, sizeof value);
        wait_until({"the rest of its warp", 0, [arrived = &slot.arrived] { return !*arrived; }});
        std::vector<Value> all(32);
        for (int i = 0; i < 32; ++i) memcpy(&all[i], warp.taken[i].bytes, sizeof value);
        return all;
    }

    static int lane() { return now->thread; }

    // Says what is wrong. If a thread runs, it ends there.
    static void fail(const char* what) {
        failed = true;
        say(what);
        if (now) setcontext(&now->scheduler);
    }

    static inline bool failed = false;

private:
    static inline Warp* now = nullptr;

    struct Slot {
        int kind;
        bool arrived;
        unsigned char bytes[32];
    };
    static constexpr size_t STACK = 1 << 16;

    static void begin() {
        now->work();
        now->done[now->thread] = true;
    }

    // Ends an instruction of the whole warp if all threads are there.
    bool gather() {
        for (Slot& slot : slots)
            if (!slot.arrived) return true;
        for (Slot& slot : slots) {
            if (slot.kind != slots[0].kind) fail("threads are at different instructions of the whole warp");
            slot.arrived = false;
        }
        memcpy(taken, slots, sizeof slots);
        return !failed;
    }

    int first, thread = 0;
    std::function<void()> work;
    std::unique_ptr<char[]> stacks;
    ucontext_t scheduler, fibers[32];
    Wait waits[32];
    Slot slots[32] = {}, taken[32] = {};
    bool done[32] = {};
};

inline void fail(const char* what) { Warp::fail(what); }

enum Kind { SHUFFLE, ANY, BALLOT, MEET, MATRICES, MATRICES_TRANSPOSED, TRANSPOSED, PRODUCT };

template <class Value>
Value __shfl_sync(unsigned, Value value, int from) {
    return Warp::exchange(SHUFFLE, value)[from % 32];
}
template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int far) {
    return Warp::exchange(SHUFFLE, value)[Warp::lane() ^ far];
}
inline bool __any_sync(unsigned, bool value) {
    std::vector<char> all = Warp::exchange(ANY, char(value));
    return std::any_of(all.begin(), all.end(), [](char one) { return one; });
}
inline uint32_t __ballot_sync(unsigned, bool value) {
    std::vector<char> all = Warp::exchange(BALLOT, char(value));
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= uint32_t(all[i]) << i;
    return votes;
}
inline void __syncwarp() { Warp::exchange(MEET, 0); }
inline void __threadfence() {}

inline int atomicAdd(int* place, int value) {
    int before = *place;
    *place += value;
    return before;
}
template <class Value>
Value __ldcg(const Value* from) {
    return *from;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __expf(float value) { return expf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(uint32_t value) { return __builtin_ffs(value); }

// A warp on the CPU: its 32 threads are fibers that run in turn, from one instruction of the whole warp to the next. What
// CUDA C++ sources use of the language, and of the instructions in `hopper.cuh` and `warp_products.cuh`, is defined here as
// the PTX manual defines it. Copies of the tensor memory accelerator are done when they are asked for, as early as they may
// be: whoever asks for a place before it was read, reads wrong numbers.

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

using std::max;
using std::min;

struct Index {
    int x;
};
inline Index threadIdx, blockIdx, gridDim;

struct float2 {
    float x, y;
};

inline bool say(const char* what) {
    fprintf(stderr, "emulated warp: %s\n", what);
    return false;
}

class Warp {
public:
    // Runs `work` by the threads 32 warp to 32 warp + 31 of a block. Returns whether nothing failed.
    static bool run(int warp, const std::function<void()>& work) {
        Warp own(warp, work);
        return own.finish();
    }

    // All threads give `value` and get what all gave. `kind` tells instructions apart: a warp must not be at several.
    template <class Value>
    static std::vector<Value> exchange(int kind, const Value& value) {
        static_assert(sizeof(Value) <= sizeof(Slot::bytes));
        Warp& warp = *now;
        Slot& slot = warp.slots[warp.thread];
        slot.kind = kind, slot.arrived = true;
        memcpy(slot.bytes, &value, sizeof value);
        warp.yield();
        std::vector<Value> all(32);
        for (int i = 0; i < 32; ++i) memcpy(&all[i], warp.taken[i].bytes, sizeof value);
        return all;
    }

    static int lane() { return now->thread; }

    // Ends the warp, from one of its threads.
    [[noreturn]] static void give_up() {
        now->failed = true;
        setcontext(&now->scheduler);
        abort();
    }

private:
    static inline Warp* now = nullptr;

    struct Slot {
        int kind;
        bool arrived;
        unsigned char bytes[32];
    };
    static constexpr size_t STACK = 1 << 18;

    Warp(int warp, const std::function<void()>& work) : first(32 * warp), work(work) {
        now = this;
        for (thread = 0; thread < 32; ++thread) {
            stacks.emplace_back(new char[STACK]);
            getcontext(&fibers[thread]);
            fibers[thread].uc_stack.ss_sp = stacks.back().get(), fibers[thread].uc_stack.ss_size = STACK;
            fibers[thread].uc_link = &scheduler;
            makecontext(&fibers[thread], begin, 0);
        }
    }

    static void begin() {
        now->work();
        now->slots[now->thread].arrived = false, now->ended[now->thread] = true;
    }

    void yield() {
        swapcontext(&fibers[thread], &scheduler);
        threadIdx.x = first + thread;
    }

    bool finish() {
        while (true) {
            for (thread = 0; thread < 32; ++thread) {
                if (ended[thread]) continue;
                slots[thread].arrived = false, threadIdx.x = first + thread;
                swapcontext(&scheduler, &fibers[thread]);
                if (failed) return false;
            }
            int arrived = 0;
            for (int i = 0; i < 32; ++i) arrived += slots[i].arrived;
            if (arrived == 0) return true;
            if (arrived != 32) return say("some threads have ended, others wait for them");
            for (int i = 1; i < 32; ++i)
                if (slots[i].kind != slots[0].kind) return say("threads are at different instructions of the whole warp");
            memcpy(taken, slots, sizeof slots);
        }
    }

    int first, thread = 0;
    std::function<void()> work;
    std::vector<std::unique_ptr<char[]>> stacks;
    ucontext_t scheduler, fibers[32];
    Slot slots[32] = {}, taken[32] = {};
    bool ended[32] = {}, failed = false;
};

inline void fail(const char* what) {
    say(what);
    Warp::give_up();
}

enum Kind { SHUFFLE, ANY, MEET, MATRICES, MATRICES_TRANSPOSED, TRANSPOSED, PRODUCT };

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

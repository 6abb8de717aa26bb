// The functions of `twostroke/kernels/streamed_decode.cu`, on the CPU. Blocks run one after the other, their warps too, or in
// turn.

#include <signal.h>

#include "cuda.h"
#include "cuda_bf16.h"
#include "hopper.cuh"

#include "streamed_decode.cuh"

namespace {

alignas(1024) uint8_t raw[1 << 18];

enum Order { FORWARDS, BACKWARDS, IN_TURN };

template <class S>
int run(const Attention& attention, int blocks, int order) {
    std::function<void()> work = [&] { streamed_decode<S>(attention); };
    gridDim.x = blocks;
    static_assert(sizeof(Shared<S>) + 1024 <= sizeof raw);
    memset(raw, 0xFF, sizeof raw);  // NaN
    has_input = false;
    for (int i = 0; i < blocks; ++i) {
        blockIdx.x = order == BACKWARDS ? blocks - 1 - i : i;
        int at_once = order == IN_TURN ? S::WARPS : 1;
        for (int j = 0; j < S::WARPS; j += at_once)
            if (!Warp::run(order == BACKWARDS ? S::WARPS - 1 - j : j, at_once, work)) return 1;
    }
    return 0;
}

// As long as it lives, a warp fails that reads where no memory is.
class Guard {
public:
    Guard() {
        struct sigaction action {};
        action.sa_handler = [](int) { fail("no memory is there"); };
        action.sa_flags = SA_RESETHAND;
        sigaction(SIGSEGV, &action, &before);
    }
    ~Guard() { sigaction(SIGSEGV, &before, nullptr); }

private:
    struct sigaction before;
};

}  // namespace

extern "C" {

int order = FORWARDS;  // of the warps

// Lets the kernel ahead of the next one copy numbers, at its end.
void copy_late(void* to, const void* from, uint64_t bytes) { input.push_back({to, from, bytes}); }

int attention_bytes() { return sizeof(Attention); }

int describe_cache(void* map, const void* data, uint64_t lines, uint32_t unit_lines) {
    *static_cast<CUtensorMap*>(map) = {static_cast<const unsigned char*>(data), lines, 64, unit_lines, {}};
    return 0;
}

int launch_attention(const void* given, int dim, int warps, int stages, int blocks, int, void*) {
    const Attention& attention = *static_cast<const Attention*>(given);
    shared_memory = raw;
    Guard guard;
    int code = 1;
    with_shape(dim, warps, stages, [&](auto shape) { code = run<decltype(shape)>(attention, blocks, order); });
    return code;
}
}

// The functions of `twostroke/kernels/streamed_prefill.cu`, on the CPU.

#include "cuda.h"
#include "cuda_bf16.h"
#include "hopper.cuh"

#include "streamed_prefill.cuh"

namespace {

template <int DIM>
std::string name(uint32_t at) {
    using Memory = Shared<DIM>;
    uint32_t begin = 1024;  // of what a block shares: its first 16 bytes are not its own, and it is aligned
    auto named = [&](const char* what, size_t offset) {
        uint32_t place = (at - begin - offset) / sizeof(uint64_t);
        bool inside = at >= begin + offset && place < sizeof(Gate) / sizeof(uint64_t);
        return inside ? what + std::string(place < STAGES ? " full " : " empty ") + std::to_string(place % STAGES) : "";
    };
    return named("queries", offsetof(Memory, of_queries)) + named("keys", offsetof(Memory, of_keys)) +
           named("values", offsetof(Memory, of_values)) + named("landed queries", offsetof(Memory, landed));
}

// What the kernel ahead writes, queries among it: it is not there before that has ended.
template <int DIM>
int run(const Prompts& prompts, int blocks, uint32_t seed) {
    const PairsMap& queries = *reinterpret_cast<const PairsMap*>(&prompts.queries);
    size_t bytes = ((queries.outer - 1) * queries.outer_stride + (queries.inner - 1) * queries.inner_stride + queries.columns) * 2;
    unsigned char* place = const_cast<unsigned char*>(queries.data);
    std::vector<unsigned char> written(place, place + bytes);
    memset(place, 0xFF, bytes);
    groups.clear(), memories.clear(), input_is_there = false;
    Grid grid(blocks, THREADS / 32, 1, seed, [&] { streamed_prefill<DIM>(prompts); });
    grid.much_later([&] {
        memcpy(place, written.data(), bytes);
        input_is_there = true;
    });
    return grid.run(name<DIM>) ? 0 : 1;
}

}  // namespace

extern "C" {

int seed = 0;

int prompts_bytes() { return sizeof(Prompts); }

int describe_cache(void* map, const void* data, uint64_t lines, uint64_t dim, uint32_t box_positions) {
    *static_cast<CUtensorMap*>(map) = {static_cast<const unsigned char*>(data), lines, dim, box_positions, {}};
    return 0;
}

int describe_queries(void* map, const void* data, uint64_t tokens, uint64_t heads, uint64_t dim, uint64_t token_stride,
                     uint64_t head_stride, uint32_t box_tokens, uint32_t box_heads) {
    *static_cast<PairsMap*>(map) = {static_cast<const unsigned char*>(data), tokens, heads, dim, token_stride, head_stride, box_tokens, box_heads};
    return 0;
}

int launch_prompts(const void* given, int dim, int blocks, int, void*) {
    const Prompts& prompts = *static_cast<const Prompts*>(given);
    return dim == 128 ? run<128>(prompts, blocks, seed) : run<64>(prompts, blocks, seed);
}
}

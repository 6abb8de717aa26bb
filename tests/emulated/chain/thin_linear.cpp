// The functions of `twostroke/kernels/thin_linear.cu`, on the CPU.

#include "cuda.h"
#include "cuda_bf16.h"
#include "hopper.cuh"

#include "thin_linear.cuh"

namespace {

template <class S>
std::string name(uint32_t at) {
    uint32_t begin = 1024;  // of what blocks share: their first 16 bytes are not theirs, and it is aligned
    auto named = [&](const char* what, size_t offset, int count) {
        uint32_t place = (at - begin - offset) / sizeof(uint64_t);
        return at >= begin + offset && place < uint32_t(count) ? what + (" " + std::to_string(place)) : "";
    };
    return named("full", offsetof(Shared<S>, full), S::STAGES) + named("empty", offsetof(Shared<S>, empty), S::STAGES) +
           named("sums_here", offsetof(Shared<S>, sums_here), 1) + named("sums_read", offsetof(Shared<S>, sums_read), 1);
}

// What the kernel ahead writes: it is not there before that has ended.
struct Awaited {
    unsigned char* place;
    std::vector<unsigned char> written;

    Awaited(const void* from, size_t bytes) : place((unsigned char*)from), written(place, place + bytes) { memset(place, 0xFF, bytes); }
    void write() const { memcpy(place, written.data(), written.size()); }
};

std::vector<Awaited> inputs_of(const Chain& chain) {
    std::vector<Awaited> inputs;
    for (int i = 0; i < chain.count; ++i) {
        const auto& [w, x, terms] = chain.products[i];
        if (terms.in_ready) continue;
        inputs.emplace_back(x.data, x.rows * x.columns * 2);
        if (terms.in_squares) inputs.emplace_back(terms.in_squares, terms.in_parts * terms.tokens * 4);
        if (terms.residual) inputs.emplace_back(terms.residual, terms.tokens * terms.out_stride * 2);
    }
    return inputs;
}

void spoil_outputs(const Chain& chain) {
    for (int i = 0; i < chain.count; ++i) {
        const Terms& terms = chain.products[i].terms;
        size_t bytes = terms.tokens * terms.out_stride * 2;
        memset(terms.out, 0xFF, bytes);
        if (terms.scaled) memset(terms.scaled, 0xFF, bytes);
        if (terms.out_squares) memset(terms.out_squares, 0xFF, terms.tiles * terms.tokens * 4);
    }
}

template <class S>
int run(const Chain& chain, int clusters, uint32_t seed) {
    std::vector<Awaited> inputs = inputs_of(chain);
    spoil_outputs(chain);
    memories.clear(), input_is_there = false;
    Grid grid(clusters * CLUSTER, THREADS / 32, CLUSTER, seed, [&] { thin_linear<S>(chain); });
    grid.much_later([&] {
        for (const Awaited& input : inputs) input.write();
        input_is_there = true;
    });
    return grid.run(name<S>) ? 0 : 1;
}

}  // namespace

extern "C" {

int seed = 0, clusters = 1;

int chain_bytes() { return sizeof(Chain); }

int describe_matrix(void* map, const void* data, uint64_t rows, uint64_t columns, uint32_t box_rows, int) {
    *static_cast<CUtensorMap*>(map) = {static_cast<const unsigned char*>(data), rows, columns, box_rows, {}};
    return 0;
}

int clusters_at_once() { return clusters; }

int launch_chain(const void* given, int clusters, void*) {
    const Chain& chain = *static_cast<const Chain*>(given);
    return chain.products[0].terms.tokens <= 32 ? run<Shape<32>>(chain, clusters, seed) : run<Shape<64>>(chain, clusters, seed);
}
}

// Chooses and launches the kernel of `streamed_decode.cuh`.

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "streamed_decode.cuh"

namespace {

struct Choice {
    void (*kernel)(Attention);
    int bytes;
};

Choice choose(int dim, int warps, int stages) {
    Choice choice{nullptr, 0};
    with_shape(dim, warps, stages, [&](auto shape) {
        using S = decltype(shape);
        choice = {streamed_decode<S>, sizeof(Shared<S>) + 1024};
    });
    return choice;
}

}  // namespace

extern "C" {

int attention_bytes() { return sizeof(Attention); }

// Describe a bf16 cache as lines of 64 numbers, read as many at a time as a unit has. Returns a CUresult.
int describe_cache(void* map, const void* data, uint64_t lines, uint32_t unit_lines) {
    return describe_lines(map, data, lines, 64, unit_lines, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Queue the attention of a layer's lanes by `blocks` blocks; if `early`, it may start before the kernel ahead of it has ended.
// Returns a cudaError_t.
int launch_attention(const void* given, int dim, int warps, int stages, int blocks, int early, cudaStream_t stream) {
    Choice choice = choose(dim, warps, stages);
    if (choice.kernel == nullptr) return cudaErrorInvalidValue;
    cudaError_t error = cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, choice.bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = 32 * warps, config.dynamicSmemBytes = choice.bytes;
    config.stream = stream, config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, choice.kernel, *static_cast<const Attention*>(given));
}
}

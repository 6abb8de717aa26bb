// Launches the kernel of `streamed_prefill.cuh`.

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "streamed_prefill.cuh"

extern "C" {

int prompts_bytes() { return sizeof(Prompts); }

// Describe a bf16 cache of `lines` x `dim`, read in boxes of so many positions x 64. Returns a CUresult.
int describe_cache(void* map, const void* data, uint64_t lines, uint64_t dim, uint32_t box_positions) {
    return describe_lines(map, data, lines, dim, box_positions, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Describe bf16 queries [tokens, heads, dim], strides in numbers, read in boxes of some tokens x some heads x 64. Returns a
// CUresult.
int describe_queries(void* map, const void* data, uint64_t tokens, uint64_t heads, uint64_t dim, uint64_t token_stride,
                     uint64_t head_stride, uint32_t box_tokens, uint32_t box_heads) {
    return describe_pairs(map, data, {tokens, heads, dim}, {token_stride, head_stride}, box_tokens, box_heads);
}

// Queue the attention of a layer's prompt chunks by `blocks` blocks; if `early`, it may start before the kernel ahead of it has
// ended. Returns a cudaError_t.
int launch_prompts(const void* given, int dim, int blocks, int early, cudaStream_t stream) {
    void (*kernel)(Prompts) = dim == 128 ? streamed_prefill<128> : dim == 64 ? streamed_prefill<64> : nullptr;
    if (kernel == nullptr) return cudaErrorInvalidValue;
    int bytes = static_cast<int>(dim == 128 ? sizeof(Shared<128>) : sizeof(Shared<64>)) + 1024;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = THREADS, config.dynamicSmemBytes = bytes;
    config.stream = stream, config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, *static_cast<const Prompts*>(given));
}
}

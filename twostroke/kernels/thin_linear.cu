// Chooses and launches the kernel of `thin_linear.cuh`.

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "thin_linear.cuh"

namespace {

using Kernel = void (*)(Chain);

Kernel choose(int tokens) {
    if (tokens > 64) return nullptr;
    return tokens <= 32 ? thin_linear<Shape<32>> : thin_linear<Shape<64>>;
}

// A launch of `clusters`, free to start before the kernel ahead of it has ended.
struct Launch {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};

    Launch(int clusters, cudaStream_t stream) {
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim = {CLUSTER, 1, 1};
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = clusters * CLUSTER, config.blockDim = THREADS, config.dynamicSmemBytes = SHARED_BYTES;
        config.stream = stream, config.attrs = attributes, config.numAttrs = 2;
    }
};

}  // namespace

extern "C" {

int chain_bytes() { return sizeof(Chain); }

// Describe a bf16 matrix [rows, columns], row-major, read in boxes of box_rows x 64. Returns a CUresult.
int describe_matrix(void* map, const void* data, uint64_t rows, uint64_t columns, uint32_t box_rows, int promoted) {
    return describe_lines(map, data, rows, columns, box_rows, promoted ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Clusters of a chain that run at once, or a negative cudaError_t.
int clusters_at_once() {
    int least = 0;
    for (int tokens : {32, 64}) {
        Launch launch(1, nullptr);
        cudaError_t error = cudaFuncSetAttribute(choose(tokens), cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
        int clusters = 0;
        if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, choose(tokens), &launch.config);
        if (error != cudaSuccess) return -static_cast<int>(error);
        least = least == 0 || clusters < least ? clusters : least;
    }
    return least;
}

// Queue a chain; it may start before the kernel ahead of it has ended. Returns a cudaError_t.
int launch_chain(const void* given, int clusters, cudaStream_t stream) {
    const Chain* chain = static_cast<const Chain*>(given);
    Kernel kernel = choose(chain->products[0].terms.tokens);
    if (kernel == nullptr) return cudaErrorInvalidValue;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error != cudaSuccess) return error;
    Launch launch(clusters, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, *chain);
}
}

// The last step of a thin product: sums become an output, by its epilogue.

#pragma once

#include "product_chain.cuh"

namespace {

// Past the first cache: another multiprocessor may have written the place since this one read it last.
__device__ __forceinline__ uint4 load(const void* from) { return __ldcg(static_cast<const uint4*>(from)); }

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& raw) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = __bfloat1622float2(pairs[i]);
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
}

// Rounds the numbers, too: as those who read them will see them.
__device__ __forceinline__ void pack(void* to, float (&from)[8]) {
    uint4 raw;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
        float2 pair = __bfloat1622float2(pairs[i]);
        from[2 * i] = pair.x, from[2 * i + 1] = pair.y;
    }
    *static_cast<uint4*>(to) = raw;
}

// Sums the parts of the `chunk`th eight rows of one token.
template <class S>
__device__ __forceinline__ void add_up(float (&sum)[8], const float* received, int token, int chunk) {
    const float* first = received + (token / 8 * S::BOXES + chunk / 2) * S::ROW + token % 8 * 16 + chunk % 2 * 2;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = 0.0f;
#pragma unroll
    for (int part = 0; part < CLUSTER; ++part)
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            float2 two = *reinterpret_cast<const float2*>(first + part * S::SHARE / 8 * S::BOXES * S::ROW + lane * 4);
            sum[lane * 2] += two.x, sum[lane * 2 + 1] += two.y;
        }
}

template <class S>
__device__ __forceinline__ float sum_of_group(float value) {
#pragma unroll
    for (int far = S::GROUP / 2; far; far /= 2) value += __shfl_xor_sync(~0u, value, far);
    return value;
}

__device__ __forceinline__ void meet_finishers() { meet<1, 32 * FINISHERS>(); }

// The threads that apply epilogues. Each has eight rows of a token, and a token per pass.
template <class S>
struct Finisher {
    Shared<S>& s;
    int rank, worker;
    int chunk = worker % S::GROUP, first_token = worker / S::GROUP, base = rank * S::SHARE;
    int product = -1;
    float scale[S::PASSES];

    __device__ int token_of(int pass) const { return base + pass * S::PER_PASS + first_token; }

    // Waits for all of the product's input, and finds 1 / rms of its tokens from the sums of squares that the product before left.
    __device__ void turn_to(const Tile& tile) {
        if (tile.product == product) return;
        product = tile.product;
        const Terms& a = tile.of();
        if (a.in_ready != nullptr) {
            for (int part = worker; part < a.in_count; part += 32 * FINISHERS)
                while (announced(a.in_ready + part) != CLUSTER) {}
            meet_finishers();
        }
#pragma unroll
        for (int pass = 0; pass < S::PASSES; ++pass) {
            scale[pass] = 1.0f;
            if (a.in_squares == nullptr) continue;
            float squares = 0.0f;
            int token = token_of(pass);
            if (token < a.tokens)
                for (int part = chunk; part < a.in_parts; part += S::GROUP) squares += __ldcg(&a.in_squares[part * a.tokens + token]);
            scale[pass] = rsqrtf(sum_of_group<S>(squares) * a.in_mean_factor + a.eps);
        }
    }

    // Applies the epilogue to a tile's sums and writes them.
    template <int EPILOGUE>
    __device__ void finish(const Terms& a, int tile, int number) {
        int width = EPILOGUE == SILU ? a.tile / 2 : a.tile;  // of the output tile
        int n = tile * width + chunk * 8;
        bool inside = chunk < width / 8 && n < a.rows;
        uint4 old[S::PASSES] = {};
        float weight[8] = {};
        if (EPILOGUE == RESIDUAL && inside) {
            unpack(weight, load(a.norm + n));
#pragma unroll
            for (int pass = 0; pass < S::PASSES; ++pass) {
                int token = token_of(pass);
                if (token < a.tokens) old[pass] = load(a.residual + static_cast<int64_t>(token) * a.out_stride + n);
            }
        }
        if (EPILOGUE == SCALE && a.bias != nullptr && inside) unpack(weight, load(a.bias + n));
        wait_for(&s.sums_here, number & 1);
        // The next tile's bytes are expected before anyone is told that there is room for them.
        if (worker == 0) expect(&s.sums_here, 4 * CLUSTER * S::SHARE * TILE);
#pragma unroll
        for (int pass = 0; pass < S::PASSES; ++pass) {
            int token = token_of(pass), own = token - base;
            int64_t place = static_cast<int64_t>(token) * a.out_stride + n;
            float squares = 0.0f;
            if (inside && token < a.tokens) {
                float value[8], other[8] = {};
                add_up<S>(value, s.received, own, chunk);
                if (EPILOGUE == SILU) add_up<S>(other, s.received, own, chunk + width / 8);
                if (EPILOGUE == RESIDUAL) unpack(other, old[pass]);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    float& v = value[e];
                    v *= scale[pass];
                    if (EPILOGUE == SCALE) v += weight[e];
                    if (EPILOGUE == RESIDUAL) v += other[e];
                    if (EPILOGUE == SILU) v *= __fdividef(scale[pass] * other[e], 1.0f + __expf(-v));
                }
                pack(a.out + place, value);
                if (EPILOGUE == RESIDUAL) {
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        squares += value[e] * value[e];
                        value[e] *= weight[e];
                    }
                    pack(a.scaled + place, value);
                }
            }
            if (EPILOGUE == RESIDUAL) {
                squares = sum_of_group<S>(squares);
                if (chunk == 0 && token < a.tokens) a.out_squares[tile * a.tokens + token] = squares;
            }
        }
        __syncwarp();
        meet_finishers();
        if (worker == 0 && a.out_ready != nullptr) announce(a.out_ready + tile);
        if (worker < CLUSTER) arrive_at(address_in(address(&s.sums_read), worker));
    }
};

template <class S>
__device__ void finish_tiles(Shared<S>& s, const Chain& chain, int rank, int worker) {
    Finisher<S> finisher{s, rank, worker};
    wait_for_input();
    for (Tile tile(s.terms, chain.count, rank); tile.inside(); tile.advance()) {
        finisher.turn_to(tile);
        if (tile.of().epilogue == SCALE) finisher.template finish<SCALE>(tile.of(), tile.index, tile.number);
        if (tile.of().epilogue == RESIDUAL) finisher.template finish<RESIDUAL>(tile.of(), tile.index, tile.number);
        if (tile.of().epilogue == SILU) finisher.template finish<SILU>(tile.of(), tile.index, tile.number);
    }
}

}  // namespace

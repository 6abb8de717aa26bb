// Attention of decode lanes over the paged cache, in bf16, at the speed at which the cache can be read.
//
// What `paged_decode.py` computes, built so that reads never pause:
//   * A warp is on its own. It takes shares of the schedule one after the other, and reads the next share's keys and values
//     while it still works on the present one: into a ring in shared memory, by the tensor memory accelerator, so that no
//     thread spends instructions on addresses. What a share needs first, its record and its block numbers, is asked for a share
//     ahead.
//   * A unit is 16 positions of a kv head. Its scores are a product of 16 positions x 8 query heads, so a group of up to 8
//     fills it without the padding that a product of 16 query heads has.
//   * One block runs on each multiprocessor. Eight warps that each ask for one unit while they work on another leave less of
//     the device idle when the last shares end than fewer with longer rings. Fewer are better where each has two shares.
// Who takes which share may differ from run to run; what a share gives, and the order in which shares are added up, may not.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "head_softmax.cuh"
#include "hopper.cuh"

namespace {

constexpr int RECORD = 8, ROW = 0, LANE = 1, BEGIN = 2, END = 3, SPLIT = 4, SPLITS = 5;  // see decode_schedule.py

struct Attention {
    CUtensorMap keys, values;
    int kv_heads, group, block_units, table_stride, most_records;
    int q_token, q_head, k_token, k_head, v_token, v_head;  // strides, in numbers
    int zero;                                               // is 0, which the compiler cannot know
    float eps, scale;                                       // the scale includes log2(e)
    const __nv_bfloat16 *q, *k, *v;
    const float *cosines, *sines;              // [lanes, DIM / 2]; null: nothing to rotate or to norm
    const __nv_bfloat16 *q_weight, *k_weight;  // [DIM] of the norm before the rotation; null: none
    __nv_bfloat16 *key_cache, *value_cache;    // [blocks, kv_heads, block_units * UNIT, DIM]
    const int* table;
    const int64_t* slots;
    const int* schedule;
    float *partial, *log_sum;
    int* arrivals;
    int* tickets;  // taken, and warps that are done; both zero between launches
    __nv_bfloat16* out;
};

template <int DIM_, int WARPS_, int STAGES_>
struct Shape {
    static constexpr int DIM = DIM_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int LINES = DIM / 64;  // of 128 bytes, of a position
    static constexpr int UNIT_BYTES = UNIT * DIM * 2;
};

// Gives `act` the shape of a kernel that there is, or nothing. `stages` is that of units of 128 numbers; smaller ones are as
// many more.
template <class Act>
void with_shape(int dim, int warps, int stages, Act act) {
    if (dim == 128 && warps == 8 && stages == 2) act(Shape<128, 8, 2>{});
    if (dim == 128 && warps == 4 && stages == 6) act(Shape<128, 4, 6>{});
    if (dim == 64 && warps == 8 && stages == 2) act(Shape<64, 8, 4>{});
    if (dim == 64 && warps == 4 && stages == 6) act(Shape<64, 4, 12>{});
}

template <class S>
struct Shared {
    uint8_t keys[S::WARPS][S::STAGES][S::UNIT_BYTES], values[S::WARPS][S::STAGES][S::UNIT_BYTES];
    __nv_bfloat16 q_weight[S::WARPS][S::DIM], k_weight[S::WARPS][S::DIM];  // if there are norms
    uint64_t full[S::WARPS][S::STAGES];
};

// What a warp works on: a record of the schedule, for one kv head. Its words come in the first threads.
struct Share {
    int ticket, head, row, lane, begin, end, split, splits;

    static __device__ __forceinline__ int load(const Attention& a, int ticket, int thread) {
        int item = ticket / a.kv_heads;
        return item < a.most_records && thread < RECORD ? a.schedule[(1 + item) * RECORD + thread] : 0;
    }
    Share() = default;
    __device__ __forceinline__ Share(const Attention& a, int ticket, int word) : ticket(ticket), head(ticket % a.kv_heads) {
        row = __shfl_sync(~0u, word, ROW), lane = __shfl_sync(~0u, word, LANE);
        begin = __shfl_sync(~0u, word, BEGIN), end = __shfl_sync(~0u, word, END);
        split = __shfl_sync(~0u, word, SPLIT), splits = __shfl_sync(~0u, word, SPLITS);
    }
    __device__ int first_unit() const { return begin / UNIT; }
    __device__ int last_unit() const { return begin < end ? (end + UNIT - 1) / UNIT : begin / UNIT; }  // exclusive
    __device__ bool newest() const { return split == splits - 1; }
};

// Asks for the units of one share after the other. The numbers of 64 blocks lie in the threads' registers.
template <class S>
struct Reader {
    const Attention& a;
    Shared<S>& s;
    int warp, thread, waited_for = 0, place = 0, left = 0, head = 0;
    int block = 0, inside = 0, behind, blocks, more, next_blocks, next_more;  // the next unit is `inside` of `blocks[block]`
    const int* table;
    uint64_t policy = read_once_policy();

    __device__ Reader(const Attention& a, Shared<S>& s, int warp, int thread) : a(a), s(s), warp(warp), thread(thread) {}

    __device__ const int* table_of(const Share& share) const { return a.table + static_cast<int64_t>(share.row) * a.table_stride; }
    __device__ __forceinline__ int number(const int* table, int index, int last) const {
        return index * a.block_units < last ? table[index] : 0;
    }
    // Asks for the first block numbers of the share that `turn_to` names next.
    __device__ __forceinline__ void look_up(const Share& share) {
        int first = share.first_unit() / a.block_units + thread, end = share.last_unit();
        next_blocks = number(table_of(share), first, end), next_more = number(table_of(share), first + 32, end);
    }
    __device__ __forceinline__ void turn_to(const Share& share) {
        int unit = share.first_unit(), last = share.last_unit();
        head = share.head, left = last - unit, inside = unit % a.block_units, unit -= inside;
        block = 0, behind = (last - unit + a.block_units - 1) / a.block_units - 64;
        table = table_of(share) + unit / a.block_units + 64, blocks = next_blocks, more = next_more;
    }
    __device__ bool has_more() const { return left > 0; }
    __device__ bool has_room() const { return waited_for < S::STAGES; }
    __device__ void give_back() { --waited_for; }

    // `after` is 0, and depends on whatever was read from the place that this unit will take.
    __device__ __forceinline__ void ask(int after) {
        if (block == 32) block = 0, blocks = more, more = thread < behind ? table[thread] : 0, table += 32, behind -= 32;
        int number = __shfl_sync(~0u, blocks, block);
        if (thread == 0) {
            int line = ((number * a.kv_heads + head) * a.block_units + inside) * UNIT * S::LINES + after;
            uint64_t* full = &s.full[warp][place];
            expect(full, 2 * S::UNIT_BYTES);
            load_once(s.keys[warp][place], &a.keys, 0, line, full, policy);
            load_once(s.values[warp][place], &a.values, 0, line, full, policy);
        }
        if (++place == S::STAGES) place = 0;
        if (++inside == a.block_units) inside = 0, ++block;
        ++waited_for, --left;
    }
};

// A lane's newest key and value, and where they are kept.
template <int DIM>
struct Newest {
    Head<DIM> key;  // as all heads of the warp
    typename Softmax<DIM>::Value value;
    uint32_t pair[DIM / 64];  // of the value, as it is stored
    int slot;

    __device__ __forceinline__ void load(const Attention& a, const Share& share, int thread) {
        int64_t lane = share.lane;
        const __nv_bfloat16* from = a.v + lane * a.v_token + share.head * a.v_head;
        key.load(a.k + lane * a.k_token + share.head * a.k_head, thread);
        value.load(from, thread);
#pragma unroll
        for (int i = 0; i < DIM / 64; ++i) pair[i] = load_pair(from + i * 64 + thread * 2);
        slot = static_cast<int>(a.slots[lane]);
    }
    __device__ __forceinline__ void keep(const Attention& a, const Share& share, int thread) const {
        int size = a.block_units * UNIT, block = slot / size;
        int64_t line = static_cast<int64_t>(block * a.kv_heads + share.head) * size + (slot - block * size);
        __nv_bfloat16 *keys = a.key_cache + line * DIM + thread % 4 * 2, *values = a.value_cache + line * DIM + thread * 2;
        if (thread < 4)
#pragma unroll
            for (int i = 0; i < Head<DIM>::PAIRS; ++i) *reinterpret_cast<uint32_t*>(keys + i * 8) = key.pair[i];
#pragma unroll
        for (int i = 0; i < DIM / 64; ++i) *reinterpret_cast<uint32_t*>(values + i * 64) = pair[i];
    }
};

// Loads a share's queries, normed and rotated, and begins its softmax; the share with the newest position stores its key and
// value. All loads are asked for before the first is waited for: the memory has little to do till a warp takes its units.
template <class S>
__device__ __forceinline__ void begin(const Attention& a, const Shared<S>& s, const Share& share, Head<S::DIM>& q,
                                      Softmax<S::DIM>& softmax, int warp, int thread) {
    constexpr int DIM = S::DIM, HALF = Head<DIM>::PAIRS / 2;
    int query = share.head * a.group + min(thread / 4, a.group - 1);  // the last one again where there are fewer than eight
    int64_t lane = share.lane;
    bool rotated = a.cosines != nullptr;
    Newest<DIM> newest;
    float2 cosines[HALF], sines[HALF];
    float2 score = {};
    q.load(a.q + lane * a.q_token + query * a.q_head, thread);
    newest.load(a, share, thread);
    if (rotated)
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            int64_t at = lane * (DIM / 2) + Head<DIM>::first(i, thread);
            cosines[i] = *reinterpret_cast<const float2*>(a.cosines + at), sines[i] = *reinterpret_cast<const float2*>(a.sines + at);
        }
    if (rotated && a.q_weight != nullptr) q.norm(s.q_weight[warp], a.eps, thread);
    if (rotated) q.rotate(cosines, sines);
    if (share.newest()) {
        if (rotated && a.k_weight != nullptr) newest.key.norm(s.k_weight[warp], a.eps, thread);
        if (rotated) newest.key.rotate(cosines, sines);
        score = newest.key.times(q);
        score.x *= a.scale, score.y *= a.scale;
        newest.keep(a, share, thread);
    }
    softmax.begin(newest.value, score, share.newest(), thread);
}

// Brings the weights of norms close to a warp.
template <class S>
__device__ __forceinline__ void fetch_norms(const Attention& a, Shared<S>& s, int warp, int thread) {
    for (int at = thread * 2; at < S::DIM; at += 64) {
        if (a.q_weight != nullptr) *reinterpret_cast<uint32_t*>(s.q_weight[warp] + at) = load_pair(a.q_weight + at);
        if (a.k_weight != nullptr) *reinterpret_cast<uint32_t*>(s.k_weight[warp] + at) = load_pair(a.k_weight + at);
    }
    __syncwarp();
}

// The weighted mean of the results of a lane's shares, in their order, for HEADS query heads from `part` on, the first share's.
// Some are asked for at once.
template <int DIM, int HEADS>
__device__ void add_up_heads(const Attention& a, int splits, int part, __nv_bfloat16* out, int thread) {
    constexpr int OWN = DIM / 32, AT_ONCE = HEADS == 8 ? 2 : 4;  // numbers of a head in a thread; shares
    int stride = a.kv_heads * a.group;
    const float *log_sums = a.log_sum + part, *numbers = a.partial + static_cast<int64_t>(part) * DIM + thread * OWN;
    float top[HEADS], total[HEADS] = {}, sum[HEADS][OWN] = {};
#pragma unroll
    for (int head = 0; head < HEADS; ++head) top[head] = NOTHING;
#pragma unroll 1
    for (int first = 0; first < splits; first += AT_ONCE) {
        float log_sum[AT_ONCE][HEADS];
        float2 pair[AT_ONCE][HEADS][OWN / 2];
#pragma unroll
        for (int next = 0; next < AT_ONCE; ++next)
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                int64_t at = static_cast<int64_t>(min(first + next, splits - 1)) * stride + head;
                log_sum[next][head] = __ldcg(log_sums + at);
#pragma unroll
                for (int i = 0; i < OWN / 2; ++i)
                    pair[next][head][i] = __ldcg(reinterpret_cast<const float2*>(numbers + at * DIM) + i);
            }
#pragma unroll
        for (int head = 0; head < HEADS; ++head) {
            float before = top[head];
#pragma unroll
            for (int next = 0; next < AT_ONCE; ++next) top[head] = fmaxf(top[head], log_sum[next][head]);
            float decay = power_of_2(before - top[head]);
            total[head] *= decay;
#pragma unroll
            for (int i = 0; i < OWN; ++i) sum[head][i] *= decay;
#pragma unroll
            for (int next = 0; next < AT_ONCE; ++next) {
                float weight = first + next < splits ? power_of_2(log_sum[next][head] - top[head]) : 0.0f;
                total[head] += weight;
#pragma unroll
                for (int i = 0; i < OWN / 2; ++i) {
                    sum[head][2 * i] += weight * pair[next][head][i].x;
                    sum[head][2 * i + 1] += weight * pair[next][head][i].y;
                }
            }
        }
    }
#pragma unroll
    for (int head = 0; head < HEADS; ++head)
#pragma unroll
        for (int i = 0; i < OWN; i += 2)
            *reinterpret_cast<uint32_t*>(out + head * DIM + thread * OWN + i) =
                rounded({sum[head][i] / total[head], sum[head][i + 1] / total[head]});
}

template <int DIM>
__device__ void add_up(const Attention& a, int splits, int part, __nv_bfloat16* out, int thread) {
    int head = 0;
    if (a.group == 8) add_up_heads<DIM, 8>(a, splits, part, out, thread), head = 8;
    if (a.group - head >= 4) add_up_heads<DIM, 4>(a, splits, part + head, out + head * DIM, thread), head += 4;
    if (a.group - head >= 2) add_up_heads<DIM, 2>(a, splits, part + head, out + head * DIM, thread), head += 2;
    if (a.group - head >= 1) add_up_heads<DIM, 1>(a, splits, part + head, out + head * DIM, thread);
}

// Writes what a share gave. Of several shares of a lane, the last to arrive adds them up.
template <int DIM>
__device__ __forceinline__ void end(const Attention& a, const Share& share, Softmax<DIM>& softmax, int thread) {
    __nv_bfloat16* out = a.out + (static_cast<int64_t>(share.lane) * a.kv_heads + share.head) * a.group * DIM;
    softmax.settle();
    if (share.splits <= 1) {
        softmax.write(out, a.group, thread);
        return;
    }
    int64_t part = static_cast<int64_t>(share.ticket) * a.group;
    softmax.write_part(a.partial + part * DIM, a.log_sum + part, a.group, thread);
    __syncwarp();
    int first = share.ticket - share.split * a.kv_heads, before = 0;
    if (thread == 0) before = join(a.arrivals + first);
    if (__shfl_sync(~0u, before, 0) != share.splits - 1) return;
    __syncwarp();
    if (thread == 0) a.arrivals[first] = 0;
    add_up<DIM>(a, share.splits, first * a.group, out, thread);
}

template <class S>
__global__ void __maxnreg__(184) streamed_decode(const __grid_constant__ Attention a) {
    extern __shared__ uint8_t raw[];
    Shared<S>& s = *kept(reinterpret_cast<Shared<S>*>(raw + (1024 - address(raw) % 1024) % 1024));
    int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    if (thread == 0) {
        for (int i = 0; i < S::STAGES; ++i) prepare(&s.full[warp][i], 1);
        fence_prepared(), fence_async();
    }
    __syncwarp();
    Places<S::DIM> places(thread);
    // A warp's first two tickets are given: those with the longest first shares get the shortest second ones. Neighbours, which
    // are of one length, go to different multiprocessors.
    int warps = gridDim.x * S::WARPS, ticket = warp * gridDim.x + blockIdx.x, next_ticket = 2 * warps - 1 - ticket;
    int word = Share::load(a, ticket, thread), shares = *a.schedule * a.kv_heads, stage = 0;
    uint32_t parity = 0;
    Share share(a, ticket, word);
    Reader<S> reader(a, s, warp, thread);
    if (ticket < shares) {
        reader.look_up(share), reader.turn_to(share);
        while (reader.has_more() && reader.has_room()) reader.ask(0);
    }
    fetch_norms(a, s, warp, thread);
    wait_for_input();
    let_next_start();
    while (share.ticket < shares) {
        word = Share::load(a, next_ticket, thread);
        if (thread == 0 && next_ticket < shares) ticket = 2 * warps + count_up(a.tickets);
        Head<S::DIM> q;
        Softmax<S::DIM> softmax;
        begin<S>(a, s, share, q, softmax, warp, thread);
        int unit = share.first_unit(), end_unit = share.last_unit();
        auto take_one = [&] {
            wait_for(&s.full[warp][stage], parity);
            __syncwarp();
            int low = share.begin - unit * UNIT, high = share.end - unit * UNIT;
            softmax.take(q, a.scale, s.keys[warp][stage], s.values[warp][stage], places, low, high, thread);
            __syncwarp();
            if (++stage == S::STAGES) stage = 0, parity ^= 1;
            reader.give_back(), ++unit;
        };
        Share next;
        bool looked = false, turned = false;
        auto read_on = [&](int after) {
            while (reader.has_room()) {
                if (!reader.has_more()) {
                    if (turned) break;
                    reader.turn_to(next), turned = true;
                    continue;
                }
                reader.ask(after);
            }
        };
        // NOTE: in one place, though the first time differs: a share begins sooner if less of its code is new to the processor.
#pragma unroll 1
        do {
            if (unit < end_unit) take_one();
            if (!looked) {
                next = Share(a, next_ticket, word), looked = true, turned = next.ticket >= shares;
                if (!turned) reader.look_up(next);
            }
            read_on(softmax.after_reads(a.zero));
        } while (unit < end_unit);
        end(a, share, softmax, thread);
        next_ticket = next.ticket < shares ? __shfl_sync(~0u, ticket, 0) : shares;
        share = next;
    }
    // Where every warp's first ticket is its last, none has been taken.
    if (shares > warps && thread == 0 && atomicAdd(a.tickets + 1, 1) == warps - 1) a.tickets[0] = a.tickets[1] = 0;
}

}  // namespace

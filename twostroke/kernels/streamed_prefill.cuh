// Causal attention of prompt chunks over the paged cache, in bf16, at a good part of the speed of products.
//
// What `paged_prefill.py` computes without a window, built so that products never pause:
//   * One block runs on each multiprocessor and takes items one after the other, the longest first: tiles of 128 rows, which are
//     the pairs of some tokens of a chunk with the query heads of a kv head.
//   * One warp asks the tensor memory accelerator for queries, keys and values, ahead of their use and across items. Three more
//     norm and rotate the queries of the next item meanwhile, where they lie.
//   * Two warp groups have 64 rows each. They take turns: while one asks for the scores of its next tile of positions and for the
//     weighted values of its last one, the other takes its softmax. Weights stay in registers.
// Who takes which item may differ from run to run; what an item gives may not.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "hopper.cuh"
#include "query_rotation.cuh"
#include "row_softmax.cuh"

namespace {

constexpr int RECORD = 4;  // see prefill_schedule.py
constexpr int GROUPS = 2, GROUP_THREADS = 128, GROUP_WARPS = 4;
constexpr int THREADS = (1 + GROUPS) * GROUP_THREADS;
constexpr int STAGES = 2;
constexpr int HALF = POSITIONS / 2;
constexpr int LINE = 128;  // bytes, of 64 numbers
constexpr int READER_REGISTERS = 56, OTHER_REGISTERS = 224;
constexpr int BLOCK_REGISTERS = 65536 / THREADS / 8 * 8 * (1 + GROUPS);  // of a thread of each group, as a block starts
static_assert(READER_REGISTERS + GROUPS * OTHER_REGISTERS <= BLOCK_REGISTERS, "a group would wait for registers for ever");
constexpr int ROTATORS = 3;         // warps
constexpr int ROTATED_TOKENS = 64;  // of an item whose queries are to be rotated, at most
constexpr int TURNS = 1, CLEARED = TURNS + GROUPS;  // where threads meet

struct alignas(128) Prompts {
    CUtensorMap queries, keys, values;
    int kv_heads, group, tile_tokens, block_size, box_positions, table_stride;
    float scale;          // includes log2(e)
    Rotation rotation;    // of queries
    const int* schedule;  // records, behind one whose first word is their number
    const int* table;
    int* tickets;  // taken, and blocks that are done; both zero between launches
    __nv_bfloat16* out;
};

// What a block works on: tokens of a chunk, for one kv head.
struct Item {
    int head, row, position, token, tokens;  // the first token's position and place in the step. No head: there are no more

    __device__ int end() const { return position + tokens; }  // of the positions that are seen
    __device__ int tiles() const { return (end() + POSITIONS - 1) / POSITIONS; }
};

// Places that are used in turn.
template <int PLACES>
struct Ring {
    int place = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void turn() {
        if (++place == PLACES) place = 0, parity ^= 1;
    }
};

struct Gate {
    uint64_t full[STAGES], empty[STAGES];

    __device__ void prepare_all(int fillers) {
        for (int i = 0; i < STAGES; ++i) prepare(&full[i], fillers), prepare(&empty[i], GROUPS * GROUP_WARPS);
    }
};

template <int DIM>
struct Shared {
    static constexpr int LINES = DIM / 64;
    uint8_t queries[STAGES][LINES][GROUPS * ROWS * LINE];
    uint8_t keys[STAGES][LINES][POSITIONS * LINE], values[STAGES][LINES][POSITIONS * LINE];
    float angles[2][ROTATED_TOKENS][DIM / 2];  // cosines and sines, of one item
    Gate of_queries, of_keys, of_values;
    uint64_t landed[STAGES];  // queries and angles, which rotators look at before others do
    Item items[STAGES];

    __device__ void prepare_all() {
        of_queries.prepare_all(ROTATORS), of_keys.prepare_all(1), of_values.prepare_all(1);
        for (uint64_t& barrier : landed) prepare(&barrier, 1);
    }
};

// A warp that asks for what the others work on.
template <int DIM>
struct Reader {
    using Memory = Shared<DIM>;

    const Prompts& a;
    Memory& s;
    int thread, items, unit, line;  // a box that this thread asks for: `unit` of a tile's, `line` of a position's
    Ring<STAGES> queries, queries_before = {STAGES - 1, 1}, keys, values;

    __device__ Reader(const Prompts& a, Memory& s, int thread) : a(a), s(s), thread(thread) {
        int units = POSITIONS / a.box_positions;
        items = a.schedule[0] * a.kv_heads, unit = thread % units, line = thread / units;
    }

    __device__ __forceinline__ Item load_item(int ticket) const {
        const int* record = a.schedule + (1 + ticket / a.kv_heads) * RECORD;
        return {ticket % a.kv_heads, record[0], record[1], record[2], record[3]};
    }

    // The line of the cache at which this thread's box of a tile begins.
    __device__ __forceinline__ int look_up(const Item& item, int tile) const {
        int position = tile * POSITIONS + unit * a.box_positions;
        if (position >= item.end()) return 0;
        int block = position / a.block_size;
        int number = a.table[static_cast<int64_t>(item.row) * a.table_stride + block];
        return (number * a.kv_heads + item.head) * a.block_size + (position - block * a.block_size);
    }

    __device__ __forceinline__ void ask_queries(const Item& item) {
        int place = queries.place;
        uint64_t* landed = &s.landed[place];
        wait_for(&s.of_queries.empty[place], queries.parity ^ 1);
        wait_for(&s.of_queries.full[queries_before.place], queries_before.parity);  // rotated: there is room for new angles
        if (thread == 0) {
            s.items[place] = item;
            if (item.tiles() > 0) {
                int angles = a.rotation.cosines != nullptr ? item.tokens * (DIM / 2) : 0, at = item.token * (DIM / 2);
                expect(landed, Memory::LINES * a.tile_tokens * a.group * LINE + 2 * angles * sizeof(float));
                for (int i = 0; i < Memory::LINES; ++i)
                    load_pairs(s.queries[place][i], &a.queries, i * 64, item.head * a.group, item.token, landed);
                if (angles > 0) {
                    load_bytes(s.angles[0], a.rotation.cosines + at, angles * sizeof(float), landed);
                    load_bytes(s.angles[1], a.rotation.sines + at, angles * sizeof(float), landed);
                }
            } else {
                arrive(landed);
            }
        }
        queries.turn(), queries_before.turn();
    }

    __device__ __forceinline__ void ask_tile(uint8_t (&to)[STAGES][Memory::LINES][POSITIONS * LINE], const CUtensorMap* map, Gate& gate,
                                             Ring<STAGES>& ring, const Item& item, int tile, int from) {
        int units = min(POSITIONS, item.end() - tile * POSITIONS + a.box_positions - 1) / a.box_positions;
        uint64_t* full = &gate.full[ring.place];
        wait_for(&gate.empty[ring.place], ring.parity ^ 1);
        if (thread == 0) expect(full, units * a.box_positions * Memory::LINES * LINE);
        __syncwarp();
        if (unit < units && line < Memory::LINES)
            load(to[ring.place][line] + unit * a.box_positions * LINE, map, line * 64, from, full);
        ring.turn();
    }

    // Keys are asked for a tile ahead of values, as they are used, and queries an item ahead.
    __device__ __forceinline__ void run() {
        const Item none = {-1, 0, 0, 0, 0};
        int blocks = gridDim.x;
        bool shared = items > blocks;
        int ticket = blockIdx.x, next = items, asked = 0;
        Item item = load_item(ticket);  // asked for beside the number of items; there is room for a record
        if (shared && thread == 0) asked = count_up(a.tickets);
        if (ticket >= items) item = none;
        int from = ticket < items ? look_up(item, 0) : 0;
        ask_queries(item);
#pragma unroll 1
        while (ticket < items) {
            Item next_item = none;
            if (shared) next = blocks + __shfl_sync(~0u, asked, 0);
            if (next < items) {
                next_item = load_item(next);
                if (thread == 0) asked = count_up(a.tickets);
            }
            int tiles = item.tiles(), before = 0;
#pragma unroll 1
            for (int tile = 0; tile <= tiles; ++tile) {
                if (tile < tiles) ask_tile(s.keys, &a.keys, s.of_keys, keys, item, tile, from);
                if (tile > 0) ask_tile(s.values, &a.values, s.of_values, values, item, tile - 1, before);
                // By now the item before needs its queries no more, or soon will not.
                if (tile == min(1, tiles)) ask_queries(next_item);
                before = from;
                if (tile + 1 < tiles) from = look_up(item, tile + 1);
            }
            if (next < items) from = look_up(next_item, 0);
            item = next_item, ticket = next;
        }
        // All tickets have been taken by who waited for them.
        if (shared && thread == 0 && atomicAdd(a.tickets + 1, 1) == blocks - 1) a.tickets[0] = a.tickets[1] = 0;
    }
};

// One of the warps that norm and rotate queries. Those that need neither go through its hands, too: with a way around it the
// compiler does products one by one; a test looks.
template <int DIM>
struct Rotator {
    using Memory = Shared<DIM>;
    using Rows = RowRotation<DIM>;
    static constexpr int TOKENS_AT_ONCE = ROTATORS * Rows::ROWS_AT_ONCE;

    const Prompts& a;
    Memory& s;
    int thread, first;  // of its warp; the first token of an item that this thread has
    Rows rows;

    __device__ Rotator(const Prompts& a, Memory& s, int warp, int thread)
        : a(a), s(s), thread(thread), first(warp * Rows::ROWS_AT_ONCE + thread / Rows::THREADS_PER_ROW), rows(a.rotation, thread) {}

    // Two heads of a token at once.
    __device__ __forceinline__ void rotate(int tokens, uint32_t queries) const {
        constexpr uint32_t ANGLES = DIM / 2 * sizeof(float);
        uint32_t cosines = address(s.angles[0]), sines = address(s.angles[1]);
#pragma unroll 1
        for (int round = 0; round < tokens; round += TOKENS_AT_ONCE) {
            uint32_t token = min(round + first, tokens - 1), row = token * a.group;
#pragma unroll 1
            for (int head = 0; head < a.group; head += 2)
                rows.rotate(queries, GROUPS * ROWS * LINE, {row + head, row + min(head + 1, a.group - 1)}, cosines + token * ANGLES,
                            sines + token * ANGLES, round + first < tokens);
        }
    }

    __device__ __forceinline__ void run() const {
        Ring<STAGES> queries;
        Item item{};
#pragma unroll 1
        while (item.head >= 0) {
            wait_for(&s.landed[queries.place], queries.parity);
            item = s.items[queries.place];
            if (item.tiles() > 0 && a.rotation.cosines != nullptr) rotate(item.tokens, address(s.queries[queries.place][0]));
            fence_async();
            __syncwarp();
            if (thread == 0) arrive(&s.of_queries.full[queries.place]);
            queries.turn();
        }
    }
};

// A warp group that computes.
template <int DIM>
struct Computer {
    using Memory = Shared<DIM>;

    const Prompts& a;
    Memory& s;
    int group, warp, thread;  // thread of its warp
    Ring<STAGES> queries, keys, values;

    __device__ Computer(const Prompts& a, Memory& s, int group, int warp, int thread) : a(a), s(s), group(group), warp(warp), thread(thread) {}

    // The same, as the compiler shall know, for all threads of a warp: it keeps in a warp's registers what depends on that alone.
    static __device__ __forceinline__ int same(int word) { return __shfl_sync(~0u, word, 0); }

    // Row of its tile, of a thread's two.
    __device__ __forceinline__ int row(int which) const { return group * ROWS + warp * 16 + thread / 4 + which * 8; }

    __device__ __forceinline__ void give_back(Gate& gate, int place) const {
        if (thread == 0) arrive(&gate.empty[place]);
    }

    // Asks for the scores of the next tile.
    template <int COUNT>
    __device__ __forceinline__ void multiply_keys(float (&score)[COUNT]) const {
        uint64_t q = describe(s.queries[queries.place][0] + group * ROWS * LINE), k = describe(s.keys[keys.place][0]);
        begin_products();
#pragma unroll
        for (int line = 0; line < Memory::LINES; ++line)
#pragma unroll
            for (int step = 0; step < 4; ++step)
                multiply(score, q + (line * GROUPS * ROWS * LINE + step * 32) / 16, k + (line * POSITIONS * LINE + step * 32) / 16,
                         line + step > 0);
        end_products();
    }

    // Asks for the weighted values of a tile.
    template <int COLUMNS>
    __device__ __forceinline__ void add_values(RowSoftmax<DIM>& rows) const {
        uint64_t v = describe_transposed(s.values[values.place][0], POSITIONS * LINE);
        begin_products();
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; ++step) add_transposed(rows.result, rows.weight[step], v + step * LINE);
        end_products();
    }

    // Positions that nobody sees may hold the NaN of an earlier owner, which a weight of zero does not hide. Both groups do it:
    // neither has to wait for the other.
    __device__ __forceinline__ void clear(int from, int to) const {
        for (int line = 0; line < Memory::LINES; ++line)
            for (int at = from * LINE + (warp * 32 + thread) * 16; at < to * LINE; at += GROUP_THREADS * 16)
                *reinterpret_cast<uint4*>(s.values[values.place][line] + at) = uint4{};
        fence_async();
        meet_at<GROUP_THREADS>(CLEARED + group);
    }

    // Takes in the scores of an item's first tile.
    template <int COLUMNS, class Hide>
    __device__ __forceinline__ void take_first(bool last, RowSoftmax<DIM>& rows, Hide hide) {
        wait_for(&s.of_keys.full[keys.place], keys.parity);
        multiply_keys(rows.template scores<COLUMNS>());
        wait_for_products_but<0>();
        pin(rows.template scores<COLUMNS>());
        give_back(s.of_keys, keys.place), keys.turn();
        if (last) give_back(s.of_queries, queries.place);
        hide();
        rows.template weigh<COLUMNS>(a.scale);
        rows.template round<COLUMNS>();
    }

    // Takes in the values of the tile before and the scores of the next one, of which `hide` hides some.
    template <int COLUMNS, class Hide>
    __device__ __forceinline__ void take_next(bool last, RowSoftmax<DIM>& rows, Hide hide) {
        wait_for(&s.of_keys.full[keys.place], keys.parity);
        meet_at<GROUPS * GROUP_THREADS>(TURNS + group);
        multiply_keys(rows.template scores<COLUMNS>());
        wait_for(&s.of_values.full[values.place], values.parity);
        add_values<POSITIONS>(rows);
        come_to<GROUPS * GROUP_THREADS>(TURNS + (group ^ 1));
        wait_for_products_but<1>();
        pin(rows.template scores<COLUMNS>());
        give_back(s.of_keys, keys.place), keys.turn();
        if (last) give_back(s.of_queries, queries.place);
        hide();
        float2 decay = rows.template weigh<COLUMNS>(a.scale);
        pin(rows.template scores<COLUMNS>());
        make_now(rows.total[0] + rows.total[1]);
        wait_for_products_but<0>();
        pin(rows.result);
        give_back(s.of_values, values.place), values.turn();
        rows.scale_result(decay);
        rows.template round<COLUMNS>();
    }

    template <int COLUMNS>
    __device__ __forceinline__ void take_last_values(int end, RowSoftmax<DIM>& rows) {
        wait_for(&s.of_values.full[values.place], values.parity);
        if (end % POSITIONS != 0) clear(end % POSITIONS, COLUMNS);
        add_values<COLUMNS>(rows);
        wait_for_products_but<0>();
        pin(rows.result);
        give_back(s.of_values, values.place), values.turn();
    }

    __device__ __forceinline__ void attend(const Item& item, int tiles, RowSoftmax<DIM>& rows) {
        int end = item.end(), whole = (item.position + 1) / POSITIONS;  // tiles of which every row sees all
        int full = (end + POSITIONS / 2 - 1) / POSITIONS;               // all tiles, or all but a last one that fills half
        int seen = min(item.position + row(0) / a.group + 1, end), seen_below = min(item.position + row(1) / a.group + 1, end);
        int tile = 0;
        auto hide = [&] { rows.template hide<POSITIONS>(seen - tile * POSITIONS, seen_below - tile * POSITIONS, thread); };
        auto hide_in_half = [&] { rows.template hide<HALF>(seen - tile * POSITIONS, seen_below - tile * POSITIONS, thread); };
        // NOTE: with branches of other shapes the assembler may find too few registers and do products one by one; a test looks.
        if (full == 0) {
            take_first<HALF>(true, rows, hide_in_half);
            take_last_values<HALF>(end, rows);
            return;
        }
        take_first<POSITIONS>(tiles == 1, rows, [&] {
            if (whole == 0) hide();
        });
        // NOTE: loops of their own, since a branch while values are under way would have the assembler wait for them there.
        ++tile;
#pragma unroll 1
        for (; tile < whole; ++tile) take_next<POSITIONS>(tile + 1 == tiles, rows, [] {});
#pragma unroll 1
        for (; tile < full; ++tile) take_next<POSITIONS>(tile + 1 == tiles, rows, hide);
        if (tile < tiles) {
            take_next<HALF>(true, rows, hide_in_half);
            take_last_values<HALF>(end, rows);
            return;
        }
        take_last_values<POSITIONS>(end, rows);
    }

    __device__ __forceinline__ void write(const Item& item, RowSoftmax<DIM>& rows) const {
        rows.settle();
        int heads = a.kv_heads * a.group;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            int token = row(which) / a.group, head = item.head * a.group + row(which) - token * a.group;
            __nv_bfloat16* out = a.out + (static_cast<int64_t>(item.token + token) * heads + head) * DIM;
            rows.write(token < item.tokens ? out : nullptr, which, thread);
        }
    }

    __device__ __forceinline__ void run() {
        if (group == 1) come_to<GROUPS * GROUP_THREADS>(TURNS);
        RowSoftmax<DIM> rows;
#pragma unroll 1
        while (true) {
            wait_for(&s.of_queries.full[queries.place], queries.parity);
            Item item = s.items[queries.place];
            item.head = same(item.head), item.position = same(item.position), item.tokens = same(item.tokens);
            if (item.head < 0) break;
            int tiles = item.tiles();
            rows.begin();
            if (tiles > 0)
                attend(item, tiles, rows);
            else
                give_back(s.of_queries, queries.place);
            queries.turn();
            write(item, rows);
        }
        if (group == 0) meet_at<GROUPS * GROUP_THREADS>(TURNS);
    }
};

template <int DIM>
__global__ void __launch_bounds__(THREADS, 1) streamed_prefill(const __grid_constant__ Prompts a) {
    DYNAMIC_SHARED(raw);
    Shared<DIM>& s = *kept(reinterpret_cast<Shared<DIM>*>(raw + (1024 - address(raw) % 1024) % 1024));
    int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        expect_map(&a.queries), expect_map(&a.keys), expect_map(&a.values);
        s.prepare_all();
        fence_prepared();
    }
    __syncthreads();
    wait_for_input();
    if (warp < GROUP_WARPS) {
        give_registers_back<READER_REGISTERS>();
        if (warp == 0)
            Reader<DIM>(a, s, thread).run();
        else
            Rotator<DIM>(a, s, warp - 1, thread).run();
    } else {
        take_registers<OTHER_REGISTERS>();
        Computer<DIM>(a, s, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, thread).run();
    }
}

}  // namespace

// The blocks of a kernel on the CPU, all at once: their warps take turns in an order, and at speeds, that a seed gives. What
// the hardware does beside them, such as a copy, lands late, by the seed too. If nobody can go on, it says who waits for what.

#pragma once

#include <array>
#include <map>
#include <random>
#include <string>

#include "warp.h"

// Where threads wait for each other.
struct Meeting {
    int arrived = 0, round = 0;

    void come(int count) {
        if (++arrived == count) arrived = 0, ++round;
    }
    void meet(int count, const char* what) {
        int own = round;
        come(count);
        Warp::wait_until({what, 0, [this, own] { return round != own; }});
    }
};

class Grid {
public:
    static constexpr int PLACES = 8;
    static constexpr size_t BYTES = 1 << 18;

    Grid(int blocks, int warps, int cluster, uint32_t seed, const std::function<void()>& work)
        : threads(32 * warps), cluster(cluster), random(seed), longest(1 << random() % 8), blocks(blocks) {
        for (int i = 0; i < blocks * warps; ++i) turns.push_back({i / warps, i % warps, std::make_unique<Warp>(i % warps, work), 1});
        for (Block& block : this->blocks) memset(block.memory(), 0xFF, BYTES), block.warps = warps;  // NaN
        clusters.resize(blocks / cluster);
        gridDim.x = blocks;
        now = this;
    }

    // Runs all to the end. `name` says what lies at an address. Returns whether nothing failed.
    bool run(const std::function<std::string(uint32_t)>& name) {
        Warp::failed = false;
        bool all = false;  // no warp is passed over in this round: in the last one, nobody could go on
        while (!Warp::failed && std::any_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.warps > 0; })) {
            if (clock++ % 64 == 0) choose_speeds();
            bool ran = land();
            std::shuffle(turns.begin(), turns.end(), random);
            for (Turn& turn : turns)
                if ((all || random() % turn.slowness == 0) && !Warp::failed) ran |= step(turn);
            if (!ran && all && landings.empty()) return say_who_waits(name);
            if (!ran && all) clock = landings.begin()->first;
            all = !ran;
        }
        return !Warp::failed;
    }

    // What the hardware does beside the warps.
    void later(std::function<void()> landing) { landings.emplace(clock + 1 + random() % longest, landing); }
    void much_later(std::function<void()> landing) { landings.emplace(clock + random() % 512, landing); }

    static int block_in_cluster(int rank) { return blockIdx.x / now->cluster * now->cluster + rank; }
    // The memory of a block, which must not have ended.
    unsigned char* memory(int block) {
        if (blocks[block].warps == 0) fail("the shared memory of a block that has ended");
        return blocks[block].memory();
    }
    void meet_block(int place, int count) { blocks[blockIdx.x].meetings[place].meet(count, "threads of its block"); }
    void come_to_block(int place, int count) { blocks[blockIdx.x].meetings[place].come(count); }
    void meet_block(int place) { meet_block(place, threads); }
    void meet_cluster() { clusters[blockIdx.x / cluster].meet(cluster * threads, "its cluster"); }

    static inline Grid* now;

private:
    struct Block {
        std::unique_ptr<unsigned char[]> raw{new unsigned char[BYTES + 1024]};
        Meeting meetings[PLACES];
        int warps;  // that have not ended

        unsigned char* memory() { return raw.get() + (1024 - reinterpret_cast<uintptr_t>(raw.get()) % 1024) % 1024; }
    };
    struct Turn {
        int block, number;
        std::unique_ptr<Warp> warp;
        uint32_t slowness;  // it runs in one of so many rounds
    };

    void choose_speeds() {
        for (Turn& turn : turns) turn.slowness = std::array{1, 1, 2, 16}[random() % 4];
    }

    bool land() {
        bool any = false;
        for (; !landings.empty() && landings.begin()->first <= clock; any = true) {
            std::function<void()> landing = std::move(landings.begin()->second);
            landings.erase(landings.begin());
            landing();
        }
        return any;
    }

    bool step(Turn& turn) {
        if (turn.warp->ended()) return false;
        blockIdx.x = turn.block, shared_memory = blocks[turn.block].memory();
        bool ran = turn.warp->step();
        if (turn.warp->ended()) --blocks[turn.block].warps;
        return ran;
    }

    bool say_who_waits(const std::function<std::string(uint32_t)>& name) {
        std::map<std::string, int> threads;
        for (const Turn& turn : turns)
            for (const Wait* wait : turn.warp->open())
                ++threads["block " + std::to_string(turn.block) + " warp " + std::to_string(turn.number) + " waits for " + wait->what +
                          (wait->place ? " " + name(wait->place) : "")];
        for (auto& [what, count] : threads) say((what + " (" + std::to_string(count) + " threads)").c_str());
        return say("nobody can go on");
    }

    int threads, cluster;  // of a block; blocks of one
    std::mt19937 random;
    uint32_t longest;  // that a landing takes, in rounds
    uint64_t clock = 0;
    std::vector<Block> blocks;
    std::vector<Meeting> clusters;
    std::vector<Turn> turns;
    std::multimap<uint64_t, std::function<void()>> landings;
};

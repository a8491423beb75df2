// Runs the source of a CUDA kernel on the CPU, one fiber a thread, so that its index arithmetic can be tested without a
// GPU. Replaces engine/kernels/cuda/tensor_core.cuh. Fragment layouts are written down from the PTX ISA ("Matrix
// Fragments for mma.m16n8k8", "ldmatrix", "movmatrix"), not from that file. Which warps run is random, so that a missing
// barrier shows as a wrong result.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct __half {
    _Float16 value;
};

static Index threadIdx, blockIdx, gridDim;

static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
static float __fdividef(float x, float y) { return x / y; }
template <class T>
static T __ldg(const T* address) {
    return *address;
}

// What a lane brings to an operation of its warp.
struct Operand {
    uint32_t words[3];
    const void* address;
};

// One at a time; two sets of operands, because a lane may begin the next operation before others have read this one's.
struct Warp {
    Operand operands[2][32];
    int arrived = 0;
    int count = 0;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool done;
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static int running;
static unsigned block_arrived, block_count;

static void run_others() { swapcontext(&fibers[running].context, &scheduler); }

static void __syncthreads() {
    unsigned count = block_count;
    if (++block_arrived == fibers.size()) {
        block_arrived = 0;
        ++block_count;
    }
    while (block_count == count) run_others();
}

// Waits for all lanes of the warp; the operands of all.
static const Operand* exchange(const Operand& mine) {
    Warp& warp = warps[running / 32];
    int count = warp.count;
    warp.operands[count % 2][running % 32] = mine;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.count;
    }
    while (warp.count == count) run_others();
    return warp.operands[count % 2];
}

static float __shfl_xor_sync(unsigned, float value, int distance) {
    Operand mine{};
    memcpy(mine.words, &value, 4);
    memcpy(&value, exchange(mine)[running % 32 ^ distance].words, 4);
    return value;
}

static uint16_t half_bits(uint32_t word, int index) { return word >> 16 * index; }
static double half_value(uint32_t word, int index) {
    uint16_t bits = half_bits(word, index);
    _Float16 value;
    memcpy(&value, &bits, 2);
    return value;
}
static uint32_t both(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

namespace baton {

constexpr int WARP = 32;

static void mma_m16n8k8(float (&c)[4], uint32_t a_low, uint32_t a_high, uint32_t b) {
    const Operand* lanes = exchange({{a_low, a_high, b}, nullptr});
    int group = running % 32 / 4, thread_in_group = running % 4;
    for (int i = 0; i < 4; ++i) {
        int column = thread_in_group * 2 + i % 2;
        double sum = 0;
        for (int k = 0; k < 8; ++k) {
            double left = half_value(lanes[group * 4 + k / 2].words[i / 2], k % 2);
            sum += left * half_value(lanes[column * 4 + k / 2].words[2], k % 2);
        }
        c[i] = static_cast<float>(c[i] + sum);
    }
}

static void load(uint32_t (&matrices)[4], const uint4* row, bool transpose) {
    const Operand* lanes = exchange({{}, row});
    int r = running % 32 / 4, c = running % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        auto at = [&](int row, int column) {
            return static_cast<const uint16_t*>(lanes[i * 8 + row].address)[column];
        };
        matrices[i] = transpose ? both(at(c, r), at(c + 1, r)) : both(at(r, c), at(r, c + 1));
    }
}
static void load_matrices(uint32_t (&matrices)[4], const uint4* row) { load(matrices, row, false); }
static void load_matrices_transposed(uint32_t (&matrices)[4], const uint4* row) { load(matrices, row, true); }

static uint32_t transposed(uint32_t matrix) {
    const Operand* lanes = exchange({{matrix}, nullptr});
    int r = running % 32 / 4, c = running % 4 * 2;
    auto at = [&](int row, int column) { return half_bits(lanes[row * 4 + column / 2].words[0], column % 2); };
    return both(at(c, r), at(c + 1, r));
}

static uint32_t pack_halves(float first, float second) {
    uint16_t bits[2];
    _Float16 halves[2] = {static_cast<_Float16>(first), static_cast<_Float16>(second)};
    memcpy(bits, halves, 4);
    return both(bits[0], bits[1]);
}

static float exp2_approximate(float x) { return exp2f(x); }

}  // namespace baton

template <class Arguments>
struct Grid {
    static void (*kernel)(Arguments);
    static Arguments arguments;

    static void thread() {
        kernel(arguments);
        fibers[running].done = true;
        run_others();
    }

    static void run_block(std::vector<int>& order, std::mt19937& random) {
        warps.assign(fibers.size() / 32, {});
        block_arrived = block_count = 0;
        for (Fiber& fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.done = false;
            makecontext(&fiber.context, thread, 0);
        }
        unsigned awake = 0;  // warps that run now; others sleep, so that warps get far ahead of each other
        size_t left = fibers.size();
        for (unsigned pass = 0; left; ++pass) {
            if (pass % 64 == 0) {
                awake = random();
                std::shuffle(order.begin(), order.end(), random);
            }
            for (int i : order) {
                if (fibers[i].done || !(awake >> i / 32 & 1)) continue;
                running = i;
                threadIdx = {static_cast<unsigned>(i), 0, 0};
                swapcontext(&scheduler, &fibers[i].context);
                left -= fibers[i].done;
            }
        }
    }

    static void launch(void (*function)(Arguments), const void* values, Index grid, unsigned threads) {
        kernel = function;
        memcpy(static_cast<void*>(&arguments), values, sizeof arguments);
        gridDim = grid;
        fibers.resize(threads);
        std::vector<int> order(threads);
        for (unsigned i = 0; i < threads; ++i) order[i] = i;
        std::mt19937 random(1);
        for (unsigned z = 0; z < grid.z; ++z) {
            for (unsigned y = 0; y < grid.y; ++y) {
                for (unsigned x = 0; x < grid.x; ++x) {
                    blockIdx = {x, y, z};
                    run_block(order, random);
                }
            }
        }
    }
};
template <class Arguments>
void (*Grid<Arguments>::kernel)(Arguments);
template <class Arguments>
Arguments Grid<Arguments>::arguments;

// A function that Python can call: launches `kernel` with a packed struct of type `Arguments`.
#define LAUNCHER(kernel, Arguments)                                                                             \
    extern "C" void launch_##kernel(const void* values, unsigned x, unsigned y, unsigned z, unsigned threads) { \
        Grid<Arguments>::launch(kernel, values, {x, y, z}, threads);                                            \
    }                                                                                                           \
    extern "C" unsigned size_of_##kernel() { return sizeof(Arguments); }

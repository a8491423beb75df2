// Attention of query chunks over paged keys and values: causal, grouped query heads, optional sliding window, fp16 with
// sums in fp32. Softmax is computed online (Milakov and Gimelshein, arXiv:1805.02867), so scores never leave registers.
//
// Grid: (tiles, query heads), last tile first, because later tiles of a prompt have more keys. A thread block of four
// warps owns 64 query rows of one sequence and one head, 16 rows a warp, and walks the keys they may see in tiles of 64.
//
// Memory
//   query, out  [T, num_heads, D] halves; a query row is query_stride halves after the one before it
//   keys        one layer of the pool: block b has [2 (key, value), num_kv_heads, block_size, D] halves at
//               keys + b * block_stride; block_size = 1 << block_shift, at least 16
//   shared      a tile of keys and a tile of values, [64, D] halves each; the 16-byte column c of row r is at c ^ (r % 8),
//               so that the eight rows of a matrix lie in different banks
//   registers   a lane keeps, for its two rows, all of the query and of the sums over values
//
// SM75 has no asynchronous copies. The next tile is read from global memory into registers before the products of this
// one and stored to shared memory after them: values travel during query * keys, the next keys during scores * values.
// A row's result depends on its own keys only: tiles of keys start at multiples of 64 whatever the chunk.

#include "tensor_core.cuh"

namespace baton {

constexpr int ROWS = 64;
constexpr int KEYS = 64;
constexpr int THREADS = 128;
constexpr int SMALLEST_BLOCK = 16;
constexpr int KEY_GROUPS = KEYS / 8;

struct PrefillArguments {
    const __half* query;
    __half* out;
    const __half* keys;
    const int* tables;
    const int* slots;
    const int* query_start;
    const int* query_len;
    const int* kv_len;
    const int* tiles;
    int64_t query_stride;
    int block_stride;
    int value_offset;  // from a key to its value, in halves
    float scale_log2;  // softmax scale * log2(e)
    int max_blocks;
    int block_shift;
    int num_heads;
    int group;  // query heads of a KV head
    int window;
};

// Where the 16-byte column c of a row lies in shared memory; `row` counts modulo 8.
__device__ __forceinline__ int swizzled(int column, int row) {
    return (column & ~7) + ((column & 7) ^ (row & 7));
}

// One thread's share of moving tiles of keys or values from the pool to shared memory, 16 bytes at a time.
template <int D>
struct TileMover {
    static constexpr int COLUMNS = D / 8;
    static constexpr int ROWS_AT_ONCE = THREADS / COLUMNS;
    static constexpr int STEPS = KEYS / ROWS_AT_ONCE;
    static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's rows share one swizzle");
    static_assert(SMALLEST_BLOCK % ROWS_AT_ONCE == 0, "the rows of one step lie in one block");

    const PrefillArguments& arguments;
    int table;  // where the sequence's block table starts
    int last_key;
    int row;
    int in_row;  // from the first half of the row of KV head 0 to this thread's 16 bytes
    int home;    // of the first step in a tile
    int blocks[KEYS / SMALLEST_BLOCK];
    uint4 moving[STEPS];

    __device__ __forceinline__ TileMover(const PrefillArguments& all, int slot, int kv_head, int last)
        : arguments(all),
          table(slot * all.max_blocks),
          last_key(last),
          row(threadIdx.x / COLUMNS),
          in_row((kv_head << all.block_shift) * D + threadIdx.x % COLUMNS * 8),
          home(row * COLUMNS + swizzled(threadIdx.x % COLUMNS, row)) {}

    // Looks up the blocks of the tile that starts at first_key.
    __device__ __forceinline__ void find(int first_key) {
#pragma unroll
        for (int i = 0; i < KEYS / SMALLEST_BLOCK; ++i) {
            int key = min(first_key + i * SMALLEST_BLOCK, last_key);
            blocks[i] = __ldg(arguments.tables + table + (key >> arguments.block_shift));
        }
    }

    // Starts reading the tile found, which starts at first_key: `offset` is 0 for its keys, value_offset for its values.
    __device__ __forceinline__ void read(int first_key, int offset) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            // Rows past the last key repeat it: nothing unwritten is ever read.
            int key = min(first_key + step * ROWS_AT_ONCE + row, last_key);
            int in_block = key & ((1 << arguments.block_shift) - 1);
            int64_t block = blocks[step * ROWS_AT_ONCE / SMALLEST_BLOCK];
            const __half* source = arguments.keys + block * arguments.block_stride + (in_block * D + in_row + offset);
            moving[step] = __ldg(reinterpret_cast<const uint4*>(source));
        }
    }

    __device__ __forceinline__ void store(uint4* tile) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            tile[home + step * ROWS_AT_ONCE * COLUMNS] = moving[step];
        }
    }
};

// Softmax state of the two rows a lane shares with its quad: row 0 is g, row 1 is g + 8.
struct RowState {
    float maximum[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0.0f, 0.0f};  // of this lane's columns only
};

// Replaces scores by exp2(scale_log2 * (score - row maximum)) and returns in `rescale` what older sums must be
// multiplied with.
__device__ __forceinline__ void online_softmax(
    float (&scores)[KEY_GROUPS][4], RowState& state, float (&rescale)[2], float scale_log2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float maximum = state.maximum[i];
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; ++n) {
            maximum = fmaxf(maximum, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
        float shift = maximum == -INFINITY ? 0.0f : maximum * scale_log2;  // all hidden so far: every weight is 0
        rescale[i] = exp2_approximate(state.maximum[i] * scale_log2 - shift);
        float sum = state.sum[i] * rescale[i];
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; ++n) {
            scores[n][2 * i] = exp2_approximate(scores[n][2 * i] * scale_log2 - shift);
            scores[n][2 * i + 1] = exp2_approximate(scores[n][2 * i + 1] * scale_log2 - shift);
            sum += scores[n][2 * i] + scores[n][2 * i + 1];
        }
        state.maximum[i] = maximum;
        state.sum[i] = sum;
    }
}

// What a thread block works on. Read again where it is needed, because the loop over keys leaves no register to keep it in.
struct QueryTile {
    int sequence;
    int first_row;  // within the sequence's chunk
    int rows;       // none: nothing to do

    __device__ __forceinline__ explicit QueryTile(const PrefillArguments& arguments) {
        int tile = gridDim.x - 1 - blockIdx.x;
        sequence = arguments.tiles[2 * tile];
        first_row = arguments.tiles[2 * tile + 1];
        rows = sequence < 0 ? 0 : min(ROWS, arguments.query_len[sequence] - first_row);
    }

    __device__ __forceinline__ int64_t packed_row(const PrefillArguments& arguments) const {
        return arguments.query_start[sequence] + first_row;
    }
};

template <int D>
__device__ __forceinline__ void paged_prefill(const PrefillArguments& arguments) {
    constexpr int COLUMNS = D / 8;
    __shared__ uint4 key_tile[KEYS * COLUMNS];
    __shared__ uint4 value_tile[KEYS * COLUMNS];

    QueryTile tile(arguments);
    if (tile.rows <= 0) return;
    int kv_head = blockIdx.y / arguments.group;
    int first_position =
        arguments.kv_len[tile.sequence] - arguments.query_len[tile.sequence] + tile.first_row;
    int num_keys = first_position + tile.rows;
    int first_key = max(0, first_position - arguments.window + 1) & ~(KEYS - 1);

    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int g = lane / 4, t = lane % 4;
    // Where the row lies that this lane passes to load_matrices, for the first four columns of a tile and the next four.
    int matrices_at[2] = {
        static_cast<int>(lane % 8 * COLUMNS + swizzled(lane / 8, lane % 8)),
        static_cast<int>(lane % 8 * COLUMNS + swizzled(lane / 8 + 4, lane % 8)),
    };

    // The query as the first operand of query * keys: [16 rows, D], one pair of matrices for every 8 columns.
    uint32_t query[COLUMNS][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int row = min(warp * 16 + i * 8 + g, tile.rows - 1);
        auto source = reinterpret_cast<const uint32_t*>(
            arguments.query + (tile.packed_row(arguments) + row) * arguments.query_stride + blockIdx.y * D);
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) query[k][i] = __ldg(source + k * 4 + t);
    }

    float sums[COLUMNS][4];  // scores * values: [16 rows, D]
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    RowState state;

    TileMover<D> mover(arguments, arguments.slots[tile.sequence], kv_head, num_keys - 1);
    mover.find(first_key);
    mover.read(first_key, 0);
    mover.store(key_tile);
    __syncthreads();

    for (int key = first_key; key < num_keys; key += KEYS) {
        bool is_last = key + KEYS >= num_keys;
        mover.read(key, arguments.value_offset);
        if (!is_last) mover.find(key + KEYS);

        float scores[KEY_GROUPS][4];
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 4) {
#pragma unroll
            for (int n = 0; n < KEY_GROUPS; ++n) {
                uint32_t matrices[4];
                load_matrices(matrices, key_tile + matrices_at[k / 4 % 2] + n * 8 * COLUMNS + (k & ~7));
#pragma unroll
                for (int i = 0; i < 4; ++i) mma_m16n8k8(scores[n], query[k + i][0], query[k + i][1], matrices[i]);
            }
        }
        mover.store(value_tile);
        __syncthreads();  // the values are there, and no warp needs these keys any more
        if (!is_last) mover.read(key + KEYS, 0);

        int warp_first = first_position + warp * 16;
        if (key + KEYS - 1 > warp_first || key <= warp_first + 15 - arguments.window) {
#pragma unroll
            for (int n = 0; n < KEY_GROUPS; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int position = warp_first + g + (e / 2) * 8;
                    int seen = key + n * 8 + t * 2 + e % 2;
                    if (seen > position || seen <= position - arguments.window) scores[n][e] = -INFINITY;
                }
            }
        }
        float rescale[2];
        online_softmax(scores, state, rescale, arguments.scale_log2);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][e] *= rescale[e / 2];
        }
#pragma unroll
        for (int k = 0; k < KEY_GROUPS; ++k) {
            // Scores leave the first product in the layout in which the second one takes its first operand.
            uint32_t low = pack_halves(scores[k][0], scores[k][1]);
            uint32_t high = pack_halves(scores[k][2], scores[k][3]);
#pragma unroll
            for (int n = 0; n < COLUMNS; n += 4) {
                uint32_t matrices[4];
                load_matrices_transposed(
                    matrices, value_tile + matrices_at[n / 4 % 2] + k * 8 * COLUMNS + (n & ~7));
#pragma unroll
                for (int i = 0; i < 4; ++i) mma_m16n8k8(sums[n + i], low, high, matrices[i]);
            }
        }
        if (!is_last) mover.store(key_tile);
        __syncthreads();  // the next keys are there, and no warp needs these values any more
    }

    tile = QueryTile(arguments);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = state.sum[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int row = warp * 16 + i * 8 + g;
        if (row < tile.rows) {
            float factor = __fdividef(1.0f, sum);
            auto target = reinterpret_cast<uint32_t*>(
                arguments.out + ((tile.packed_row(arguments) + row) * arguments.num_heads + blockIdx.y) * D);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                target[n * 4 + t] = pack_halves(sums[n][2 * i] * factor, sums[n][2 * i + 1] * factor);
            }
        }
    }
}

}  // namespace baton

extern "C" __global__ void __launch_bounds__(baton::THREADS, 2) paged_prefill_64(baton::PrefillArguments arguments) {
    baton::paged_prefill<64>(arguments);
}

extern "C" __global__ void __launch_bounds__(baton::THREADS, 2) paged_prefill_128(baton::PrefillArguments arguments) {
    baton::paged_prefill<128>(arguments);
}

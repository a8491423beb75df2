// Attention of one query a sequence over its paged keys and values: grouped query heads, optional sliding window, fp16
// with sums in fp32. Memory-bound: keys and values are read once, for all query heads that share a KV head (at most 8).
//
// Grid of paged_decode: (sequences, KV heads, num_parts). A sequence's keys are cut into parts on the device, from kv_len,
// so a recorded graph serves every length; a part without keys ends at once. The four warps of a thread block take 16
// keys each in turn, keep their own softmax state, and merge at the end. paged_decode_merge joins the parts.
//
// Both products have the cache as first operand and the query heads as the 8 columns of the second one:
//   scores^T [16 keys, 8 heads] += keys [16, 8 of D] * query^T [8 of D, 8 heads]
//   sums^T   [16 of D, 8 heads] += values^T [16 of D, 8 keys] * scores^T [8 keys, 8 heads]
// Nothing passes through shared memory before the merge. Lane (g, t) reads 16 bytes, columns 32c + 8t ... 32c + 8t + 7, of
// keys g and g + 8. Register s of such a read is a matrix whose columns 2t and 2t + 1 are the numbers 32c + 8t + 2s and
// the next: the first product may sum over D in any order as long as the query is read the same way, and in the second
// row r of a transposed matrix simply stands for number 32c + 8(r / 2) + 2s + r % 2.
//
// Memory
//   query, out  [B, num_heads, D] halves; a query row is query_stride halves after the one before it
//   keys        as in paged_prefill.cu
//   partial     num_parts > 1 only: [B, num_heads, num_parts, D] floats, sums relative to the part's maximum, then
//               [B, num_heads, num_parts, 2] floats, that maximum (in powers of two) and the sum of weights

#include "tensor_core.cuh"

namespace baton {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int KEYS = 16;   // a warp's step
constexpr int HEADS = 8;   // columns of a product
constexpr int PART_UNIT = WARPS * KEYS;

struct DecodeArguments {
    const __half* query;
    __half* out;
    const __half* keys;
    float* partial;
    const int* tables;
    const int* slots;
    const int* kv_len;
    int64_t query_stride;
    int block_stride;
    int value_offset;  // from a key to its value, in halves
    float scale_log2;  // softmax scale * log2(e)
    int max_blocks;
    int block_shift;
    int batch;
    int num_heads;
    int group;  // query heads of a KV head
    int window;
    int num_parts;
};

// How a sequence's visible keys are cut: part i is first + i * length, as far as kv_len.
struct Parts {
    int first;
    int length;
    int count;

    __device__ __forceinline__ Parts(int kv_len, int window, int num_parts) {
        first = max(0, kv_len - window) / PART_UNIT * PART_UNIT;
        int keys = kv_len - first;
        length = (keys + num_parts * PART_UNIT - 1) / (num_parts * PART_UNIT) * PART_UNIT;
        count = keys > 0 ? (keys + length - 1) / length : 0;
    }
};

__device__ __forceinline__ uint32_t word(const uint4& vector, int index) {
    return index == 0 ? vector.x : index == 1 ? vector.y : index == 2 ? vector.z : vector.w;
}

template <int D>
__device__ __forceinline__ void paged_decode(const DecodeArguments& arguments) {
    constexpr int CHUNKS = D / 32;
    __shared__ float warp_sums[WARPS][HEADS][D];
    __shared__ float warp_maximum[WARPS][HEADS];
    __shared__ float warp_weight[WARPS][HEADS];

    int row = blockIdx.x, kv_head = blockIdx.y, part = blockIdx.z;
    int group = arguments.group;
    int kv_len = arguments.kv_len[row];
    Parts parts(kv_len, arguments.window, arguments.num_parts);
    if (part >= parts.count) {
        if (arguments.num_parts == 1) {
            __half* target = arguments.out + (static_cast<int64_t>(row) * arguments.num_heads + kv_head * group) * D;
            for (int i = threadIdx.x; i < group * D; i += THREADS) target[i] = __float2half_rn(0.0f);
        }
        return;
    }
    int begin = parts.first + part * parts.length;
    int end = min(begin + parts.length, kv_len);
    int first_visible = max(0, kv_len - arguments.window);

    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int g = lane / 4, t = lane % 4;

    uint4 query[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        query[c] = make_uint4(0, 0, 0, 0);
        if (g < group) {
            query[c] = __ldg(reinterpret_cast<const uint4*>(
                arguments.query + row * arguments.query_stride + (kv_head * group + g) * D + c * 32 + t * 8));
        }
    }

    float sums[CHUNKS][2][4];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[c][e / 4][e % 4] = 0.0f;
    }
    // Of heads 2t and 2t + 1. The weight covers this lane's keys only.
    float maximum[2] = {-INFINITY, -INFINITY};
    float weight[2] = {0.0f, 0.0f};

    const int* table = arguments.tables + static_cast<int64_t>(arguments.slots[row]) * arguments.max_blocks;
    int block_size = 1 << arguments.block_shift;
    const __half* head_keys = arguments.keys + static_cast<int64_t>(kv_head) * block_size * D + t * 8;

    for (int key = begin + warp * KEYS; key < end; key += PART_UNIT) {
        int64_t index = __ldg(table + (key >> arguments.block_shift));
        const __half* block = head_keys + index * arguments.block_stride;
        int in_block = key & (block_size - 1), last = end - 1 - key;
        // Rows past the last key repeat it: nothing unwritten is ever read.
        const __half* low = block + (in_block + min(g, last)) * D;
        const __half* high = block + (in_block + min(g + 8, last)) * D;
        uint4 keys_low[CHUNKS], keys_high[CHUNKS], values_low[CHUNKS], values_high[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            keys_low[c] = __ldg(reinterpret_cast<const uint4*>(low + c * 32));
            keys_high[c] = __ldg(reinterpret_cast<const uint4*>(high + c * 32));
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            values_low[c] = __ldg(reinterpret_cast<const uint4*>(low + arguments.value_offset + c * 32));
            values_high[c] = __ldg(reinterpret_cast<const uint4*>(high + arguments.value_offset + c * 32));
        }

        float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                mma_m16n8k8(scores, word(keys_low[c], s), word(keys_high[c], s), word(query[c], s));
            }
        }
        if (g > last || key + g < first_visible) scores[0] = scores[1] = -INFINITY;
        if (g + 8 > last || key + g + 8 < first_visible) scores[2] = scores[3] = -INFINITY;

        float rescale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = fmaxf(maximum[i], fmaxf(scores[i], scores[i + 2]));
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) {
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, distance));
            }
            float shift = highest == -INFINITY ? 0.0f : highest * arguments.scale_log2;
            rescale[i] = exp2_approximate(maximum[i] * arguments.scale_log2 - shift);
            scores[i] = exp2_approximate(scores[i] * arguments.scale_log2 - shift);
            scores[i + 2] = exp2_approximate(scores[i + 2] * arguments.scale_log2 - shift);
            weight[i] = weight[i] * rescale[i] + scores[i] + scores[i + 2];
            maximum[i] = highest;
        }
        uint32_t scores_low = transposed(pack_halves(scores[0], scores[1]));
        uint32_t scores_high = transposed(pack_halves(scores[2], scores[3]));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                float(&target)[4] = sums[c][pair];
#pragma unroll
                for (int e = 0; e < 4; ++e) target[e] *= rescale[e % 2];
                mma_m16n8k8(target, transposed(word(values_low[c], 2 * pair)),
                            transposed(word(values_low[c], 2 * pair + 1)), scores_low);
                mma_m16n8k8(target, transposed(word(values_high[c], 2 * pair)),
                            transposed(word(values_high[c], 2 * pair + 1)), scores_high);
            }
        }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2) {
            weight[i] += __shfl_xor_sync(0xffffffffu, weight[i], distance);
        }
        if (g == 0) {
            warp_maximum[warp][2 * t + i] = maximum[i] * arguments.scale_log2;
            warp_weight[warp][2 * t + i] = weight[i];
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                warp_sums[warp][2 * t + i][c * 32 + g / 2 * 8 + s * 2 + g % 2] = sums[c][s / 2][s % 2 * 2 + i];
            }
        }
    }
    __syncthreads();

#pragma unroll 1
    for (int i = threadIdx.x; i < group * D; i += THREADS) {
        int head = i / D, column = i % D;
        float highest = -INFINITY, total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, warp_maximum[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float factor = exp2_approximate(warp_maximum[w][head] - highest);
            total += factor * warp_weight[w][head];
            sum += factor * warp_sums[w][head][column];
        }
        int64_t packed_head = static_cast<int64_t>(row) * arguments.num_heads + kv_head * group + head;
        if (arguments.num_parts == 1) {
            arguments.out[packed_head * D + column] = __float2half_rn(__fdividef(sum, total));
        } else {
            int64_t index = packed_head * arguments.num_parts + part;
            arguments.partial[index * D + column] = sum;
            if (column == 0) {
                int64_t heads = static_cast<int64_t>(arguments.batch) * arguments.num_heads;
                float* state = arguments.partial + heads * arguments.num_parts * D + index * 2;
                state[0] = highest;
                state[1] = total;
            }
        }
    }
}

// Grid: (sequences, query heads); one thread a column.
template <int D>
__device__ __forceinline__ void paged_decode_merge(const DecodeArguments& arguments) {
    int64_t packed_head = static_cast<int64_t>(blockIdx.x) * arguments.num_heads + blockIdx.y;
    int64_t heads = static_cast<int64_t>(arguments.batch) * arguments.num_heads;
    const float* sums = arguments.partial + packed_head * arguments.num_parts * D + threadIdx.x;
    const float* state = arguments.partial + (heads * D + packed_head * 2) * arguments.num_parts;
    Parts parts(arguments.kv_len[blockIdx.x], arguments.window, arguments.num_parts);

    float highest = -INFINITY, total = 0.0f, sum = 0.0f;
    for (int i = 0; i < parts.count; ++i) highest = fmaxf(highest, state[2 * i]);
#pragma unroll 4
    for (int i = 0; i < parts.count; ++i) {
        float factor = exp2_approximate(state[2 * i] - highest);
        total += factor * state[2 * i + 1];
        sum += factor * sums[i * D];
    }
    arguments.out[packed_head * D + threadIdx.x] = __float2half_rn(parts.count == 0 ? 0.0f : __fdividef(sum, total));
}

}  // namespace baton

extern "C" __global__ void __launch_bounds__(baton::THREADS, 3) paged_decode_64(baton::DecodeArguments arguments) {
    baton::paged_decode<64>(arguments);
}

extern "C" __global__ void __launch_bounds__(baton::THREADS, 3) paged_decode_128(baton::DecodeArguments arguments) {
    baton::paged_decode<128>(arguments);
}

extern "C" __global__ void __launch_bounds__(64) paged_decode_merge_64(baton::DecodeArguments arguments) {
    baton::paged_decode_merge<64>(arguments);
}

extern "C" __global__ void __launch_bounds__(128) paged_decode_merge_128(baton::DecodeArguments arguments) {
    baton::paged_decode_merge<128>(arguments);
}

// y = x W^T for one row, bound by the bytes of W. Layer operations around the product are part of it:
//
//     norm      x is rms_norm(x) * norm_weight; the sum of squares is taken on the way and applied at the end
//     gated     the same, and W holds gate rows, then up rows: y = silu(gate) * up
//     residual  y is added to what `out` holds
//
// Layouts: x [K], W [N, K] (gated: [2N, K]), out [N], K a multiple of 8.
//
// A block owns `rows_per_block` outputs. Its warps cut K into slices of PIECES * 256: lane l of warp w holds
// x[slice w + 256 p + 8 l ..] in registers for the whole kernel, so that the inner loop reads nothing but W, 16 bytes a
// lane, two batches of ROWS rows ahead. Sums of four rows are reduced together (6 shuffles, not 20); warps meet in shared
// memory once every GROUP rows.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

constexpr int PIECES = 2;           // of 256 inputs a warp
constexpr int ROWS = 4;             // of a batch: 8 loads of 16 bytes
constexpr int GROUP = 32;
constexpr int MAX_WARPS = 20;       // inputs up to 10240
constexpr int MAX_NORM_WARPS = 16;  // with a norm up to 8192: registers for its weight

struct Arguments {
    const void* x;
    const void* weight;
    const void* bias;         // null: none
    const void* norm_weight;  // norm and gated
    void* out;
    int num_outputs;
    int num_inputs;
    int rows_per_block;
    float eps;
};

template <typename T> struct Value;
template <> struct Value<__half> {
    static __device__ float2 pair(unsigned bits) { return __half22float2(*reinterpret_cast<__half2*>(&bits)); }
    static __device__ float load(const void* at, int index) { return __half2float(static_cast<const __half*>(at)[index]); }
    static __device__ __half from(float value) { return __float2half_rn(value); }
};
template <> struct Value<__nv_bfloat16> {
    static __device__ float2 pair(unsigned bits) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    }
    static __device__ float load(const void* at, int index) {
        return __bfloat162float(static_cast<const __nv_bfloat16*>(at)[index]);
    }
    static __device__ __nv_bfloat16 from(float value) { return __float2bfloat16_rn(value); }
};

__device__ __forceinline__ uint4 load_once(const char* at) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(at));
    return value;
}

template <typename T> __device__ __forceinline__ void unpack(uint4 packed, float (&values)[8]) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = Value<T>::pair(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

// Totals over the warp of four values; lane 8 j holds that of value j.
__device__ __forceinline__ float reduce_four(const float (&values)[4], int lane) {
    const bool high = lane & 16, odd = lane & 8;
    const float first = (high ? values[2] : values[0]) + __shfl_xor_sync(~0u, high ? values[0] : values[2], 16);
    const float second = (high ? values[3] : values[1]) + __shfl_xor_sync(~0u, high ? values[1] : values[3], 16);
    float total = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8);
    total += __shfl_xor_sync(~0u, total, 4);
    total += __shfl_xor_sync(~0u, total, 2);
    return total + __shfl_xor_sync(~0u, total, 1);
}

template <typename T, bool NORM, bool GATED, bool RESIDUAL>
__device__ __forceinline__ void gemv(const Arguments& arguments) {
    __shared__ float partial[2][MAX_WARPS][GROUP];
    __shared__ float squares[MAX_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    const int num_inputs = arguments.num_inputs, num_outputs = arguments.num_outputs;
    const int first_output = blockIdx.x * arguments.rows_per_block;
    const int outputs = min(arguments.rows_per_block, num_outputs - first_output);
    const int num_rows = GATED ? 2 * outputs : outputs;
    const int first_input = warp * PIECES * 256 + lane * 8;

    // Row r of the block is output r, or with GATED gate (even r) or up (odd r) of output r / 2.
    const char* weight = static_cast<const char*>(arguments.weight) + 2 * size_t(first_input);
    const size_t row_bytes = 2 * size_t(num_inputs);
    auto load_rows = [&](int row, uint4 (&loaded)[ROWS][PIECES]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int at = row + i;
            const int output = GATED ? first_output + at / 2 + (at & 1) * num_outputs : first_output + at;
            const char* source = weight + output * row_bytes;
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                loaded[i][piece] = at < num_rows && first_input + piece * 256 < num_inputs
                                       ? load_once(source + piece * 512) : make_uint4(0, 0, 0, 0);
        }
    };
    uint4 loaded[2][ROWS][PIECES];
    load_rows(0, loaded[0]);
    load_rows(ROWS, loaded[1]);
    float x[PIECES][8];
    float sum = 0;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int at = first_input + piece * 256;
        const bool inside = at < num_inputs;
        const char* source = static_cast<const char*>(arguments.x) + 2 * size_t(at);
        unpack<T>(inside ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0), x[piece]);
        if (NORM) {
            float scale[8];
            source = static_cast<const char*>(arguments.norm_weight) + 2 * size_t(at);
            unpack<T>(inside ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0), scale);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum += x[piece][i] * x[piece][i];
                x[piece][i] *= scale[i];
            }
        }
    }
    if (NORM) {
#pragma unroll
        for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
        if (lane == 0) squares[warp] = sum;
    }
    auto multiply = [&](const uint4 (&rows)[ROWS][PIECES], int buffer, int offset) {
        float sums[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float sum = 0;
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                float values[8];
                unpack<T>(rows[i][piece], values);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum = fmaf(values[j], x[piece][j], sum);
            }
            sums[i] = sum;
        }
        const float total = reduce_four(sums, lane);
        if ((lane & 7) == 0) partial[buffer][warp][offset + (lane >> 3)] = total;
    };
    int buffer = 0;
    for (int first = 0; first < num_rows; first += GROUP, buffer ^= 1) {
#pragma unroll 1
        for (int offset = 0; offset < GROUP; offset += 2 * ROWS) {
            const int row = first + offset;
            if (row >= num_rows) break;
            multiply(loaded[0], buffer, offset);
            load_rows(row + 2 * ROWS, loaded[0]);
            multiply(loaded[1], buffer, offset + ROWS);
            load_rows(row + 3 * ROWS, loaded[1]);
        }
        __syncthreads();
        float scale = 1;
        if (NORM) {
            float all = 0;
            for (int w = 0; w < num_warps; ++w) all += squares[w];
            scale = rsqrtf(all / num_inputs + arguments.eps);
        }
        constexpr int APART = GATED ? 2 : 1;
        for (int index = threadIdx.x * APART; index < GROUP; index += blockDim.x * APART) {
            const int row = first + index;
            if (row >= num_rows) break;
            const int output = first_output + row / APART;
            float result[2] = {0, 0};
            for (int w = 0; w < num_warps; ++w)
#pragma unroll
                for (int half = 0; half < APART; ++half) result[half] += partial[buffer][w][index + half];
#pragma unroll
            for (int half = 0; half < APART; ++half) {
                result[half] *= scale;
                if (arguments.bias != nullptr)
                    result[half] += Value<T>::load(arguments.bias, output + half * num_outputs);
            }
            if (GATED) result[0] = result[0] / (1 + __expf(-result[0])) * result[1];
            if (RESIDUAL) result[0] += Value<T>::load(arguments.out, output);
            static_cast<T*>(arguments.out)[output] = Value<T>::from(result[0]);
        }
    }
}

}  // namespace

#define GEMV(kind, NORM, GATED, RESIDUAL, dtype, T)                                                   \
    extern "C" __global__ void __launch_bounds__((NORM ? MAX_NORM_WARPS : MAX_WARPS) * 32)            \
        gemv_##kind##_##dtype(const Arguments arguments) {                                            \
        gemv<T, NORM, GATED, RESIDUAL>(arguments);                                                    \
    }
#define GEMVS(dtype, T)                          \
    GEMV(plain, false, false, false, dtype, T)    \
    GEMV(norm, true, false, false, dtype, T)      \
    GEMV(gated, true, true, false, dtype, T)      \
    GEMV(residual, false, false, true, dtype, T)

GEMVS(float16, __half)
GEMVS(bfloat16, __nv_bfloat16)

// Tensor-core and warp primitives of SM75 (Turing), which every later architecture has too.
//
// Lane l of a warp: g = l / 4, t = l % 4. A "matrix" is 8 x 8 halves held by a warp, one 32-bit register a lane: lane
// (g, t) has row g, columns 2t and 2t + 1. (PTX ISA, "Matrix Fragments for mma.m16n8k8", "ldmatrix", "movmatrix".)
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

namespace baton {

constexpr int WARP = 32;

// c[16 x 8] += a[16 x 8] * b[8 x 8], fp16 products summed in fp32.
//   a_low, a_high: matrices of rows 0-7 and 8-15 (columns: k)
//   b:             matrix of b transposed (rows: n, columns: k)
//   c:             lane (g, t) has row g, columns 2t and 2t + 1 in c[0], c[1], and of row g + 8 in c[2], c[3]
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], uint32_t a_low, uint32_t a_high, uint32_t b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a_low), "r"(a_high), "r"(b));
}

// Four matrices from shared memory. Lane l passes the 16-byte row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], const uint4* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&matrices)[4], const uint4* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// The transpose of a matrix held by the warp.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

// Two floats rounded to halves, the first in the low 16 bits.
__device__ __forceinline__ uint32_t pack_halves(float first, float second) {
    half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

}  // namespace baton

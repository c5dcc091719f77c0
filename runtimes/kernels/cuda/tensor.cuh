// Tensor core products of 16-bit values with fp32 sums.
#pragma once

#include "device.cuh"

namespace algm::cuda {

// c += a b, for a 16x16 and a 16x8 tile of 16-bit values and, where a GPU has but half the depth, for a 16x8 and an 8x8.
#define ALGM_MULTIPLY_16(type)                                                                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                          \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                     \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#define ALGM_MULTIPLY_8(a0, a1, b)                                                                               \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                \
                 : "r"(a0), "r"(a1), "r"(b))

// sm_75 has the fp16 instruction at half the depth and none for bf16.
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
#if __CUDA_ARCH__ >= 800
    ALGM_MULTIPLY_16("f16");
#else
    ALGM_MULTIPLY_8(a[0], a[1], b0);
    ALGM_MULTIPLY_8(a[2], a[3], b1);
#endif
}

__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
    ALGM_MULTIPLY_16("bf16");
#endif
}

// Two 16-bit values of a register.
__device__ inline float2 to_floats(unsigned pair, __half) {
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
__device__ inline float2 to_floats(unsigned pair, __nv_bfloat16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Whether `kernel` multiplies 16-bit values of this type on tensor cores. What counts is the architecture it was
// compiled for: code for sm_75 that the driver translates for a later GPU lacks the bf16 instruction too.
template <class... Parameters>
int has_tensor_cores(void (*kernel)(Parameters...), bool is_bf16, bool *has) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    *has = error == cudaSuccess && (!is_bf16 || attributes.ptxVersion >= 80);
    return status_of(error);
}

}  // namespace algm::cuda

// Tensor core products of 16-bit values with fp32 sums, and how their operands come to shared memory.
#pragma once

#include "device.cuh"

#include <type_traits>

namespace algm::cuda {

// 16 bytes from device to shared memory, zeros where `valid` is false; asynchronous from sm_80 on.
__device__ inline void copy_16(void *to, const void *from, bool valid) {
#if __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
#else
    *static_cast<uint4 *>(to) = valid ? *static_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
#endif
}

__device__ inline void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

template <int Pending>
__device__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending));
#endif
}

__device__ inline void load_matrices(unsigned (&r)[4], const void *row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

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

// Hopper's matrix instructions, which read their operands from shared memory. Only code for exactly sm_90a has them;
// this kernel's launch bound tells whether it was compiled for that.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ALGM_WARPGROUPS 1
#else
#define ALGM_WARPGROUPS 0
#endif
constexpr int kWarpgroup = 4 * kWarp;
static __global__ void __launch_bounds__(ALGM_WARPGROUPS ? kWarpgroup : kWarp) warpgroup_probe() {}

// Where a tile of rows of 128 bytes, swizzled in groups of eight, begins.
__device__ inline uint64_t descriptor_of(const void *tile) {
    const uint64_t address = __cvta_generic_to_shared(tile), step = 8 * 128, swizzle_128 = 1;
    return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | (step >> 4) << 32 | swizzle_128 << 62;
}

__device__ inline void start_products() {
#if ALGM_WARPGROUPS
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void end_product_group() {
#if ALGM_WARPGROUPS
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int Pending>
__device__ void wait_products() {
#if ALGM_WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

// Makes this thread's copies visible to the matrix instructions.
__device__ inline void publish_copies() {
#if ALGM_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#define ALGM_SUMS_4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ALGM_SUMS_16(n) ALGM_SUMS_4(n), ALGM_SUMS_4(n + 1), ALGM_SUMS_4(n + 2), ALGM_SUMS_4(n + 3)
#define ALGM_PRODUCT_32(type)                                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                          \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;" \
                 : ALGM_SUMS_16(0)                                                                    \
                 : "l"(a), "l"(b))
#define ALGM_PRODUCT_64(type)                                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                  \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                   \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;" \
                 : ALGM_SUMS_16(0), ALGM_SUMS_16(4)                                                           \
                 : "l"(a), "l"(b))
#define ALGM_PRODUCT_192(type)                                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                 \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                   \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                           \
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                           \
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                           \
                 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                           \
                 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, %96, %97, 1, 1, 1, 0, 0;" \
                 : ALGM_SUMS_16(0), ALGM_SUMS_16(4), ALGM_SUMS_16(8), ALGM_SUMS_16(12), ALGM_SUMS_16(16),     \
                   ALGM_SUMS_16(20)                                                                           \
                 : "l"(a), "l"(b))

// c += a b for a 64x16 and a 16xN tile, by the four warps of a group.
#define ALGM_MULTIPLY_GROUP(N)                                                           \
    template <class T>                                                                   \
    __device__ void multiply_group(float (*c)[4], uint64_t a, uint64_t b, Constant<N>) { \
        if constexpr (std::is_same_v<T, __half>)                                         \
            ALGM_PRODUCT_##N("f16");                                                     \
        else                                                                             \
            ALGM_PRODUCT_##N("bf16");                                                    \
    }
#if ALGM_WARPGROUPS
ALGM_MULTIPLY_GROUP(32)
ALGM_MULTIPLY_GROUP(64)
ALGM_MULTIPLY_GROUP(192)
#else
template <class T, int N>
__device__ void multiply_group(float (*)[4], uint64_t, uint64_t, Constant<N>) {}
#endif

// Whether `kernel` multiplies 16-bit values of this type on tensor cores. What counts is the architecture it was
// compiled for: code for sm_75 that the driver translates for a later GPU lacks the bf16 instruction too.
template <class... Parameters>
int has_tensor_cores(void (*kernel)(Parameters...), bool is_bf16, bool *has) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    *has = error == cudaSuccess && (!is_bf16 || attributes.ptxVersion >= 80);
    return status_of(error);
}

// Whether this library's code for the current device has Hopper's matrix instructions.
inline int has_warpgroups(bool *has) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, warpgroup_probe);
    *has = error == cudaSuccess && attributes.maxThreadsPerBlock == kWarpgroup;
    return status_of(error);
}

}  // namespace algm::cuda

// Token types, 16-byte accesses and the warp and block primitives of the CUDA kernels.
#pragma once

#include "../common.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace algm::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int64_t kMaxBatch = 65535;  // images are a grid's y or z dimension

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }

inline int status_of(cudaError_t error) { return error == cudaSuccess ? ALGM_OK : ALGM_DEVICE_ERROR + error; }

// Every launch is followed by this: a kernel that never started reports here and nowhere else.
inline int launched() { return status_of(cudaGetLastError()); }

template <class Params>
int check_batch(const Params *params) {
    if (const int status = check(params)) return status;
    return params->batch > kMaxBatch ? ALGM_UNSUPPORTED : ALGM_OK;
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
    return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// V neighbouring values, moved by one instruction.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
    T value[V];
};

template <class T, int V>
__device__ Pack<T, V> load_pack(const T *from, int64_t pack) {
    return reinterpret_cast<const Pack<T, V> *>(from)[pack];
}

inline bool is_aligned(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Calls function(T{}, width of a pack as an integral constant): 16 bytes where pointers and rows allow it, else 1 value.
template <int N>
struct Constant {
    static constexpr int value = N;
};

template <class T, class Function>
int with_pack(int64_t width, bool aligned, Function function) {
    constexpr int V = 16 / sizeof(T);
    return aligned && width % V == 0 ? function(T{}, Constant<V>{}) : function(T{}, Constant<1>{});
}

template <class Function>
int with_dtype(int32_t dtype, int64_t width, bool aligned, Function function) {
    switch (dtype) {
        case ALGM_FLOAT16: return with_pack<__half>(width, aligned, function);
        case ALGM_BFLOAT16: return with_pack<__nv_bfloat16>(width, aligned, function);
        default: return with_pack<float>(width, aligned, function);
    }
}

// The shuffles below form fixed trees: the same bits on every run.
template <class T>
__device__ T warp_sum(T value) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
    return value;
}

__device__ inline int warp_min(int value) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        value = min(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

__device__ inline float warp_max(float value) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

__device__ inline int lane_index() { return threadIdx.x % kWarp; }
__device__ inline int warp_index() { return threadIdx.x / kWarp; }

// Combines one value a warp into one for the block; every thread gets it. Called by all threads, warps being whole.
template <class Combine>
__device__ int block_combine(int warp_value, Combine combine) {
    __shared__ int values[kWarp];
    __syncthreads();
    if (lane_index() == 0) values[warp_index()] = warp_value;
    __syncthreads();
    int result = values[0];
    for (int w = 1; w < blockDim.x / kWarp; ++w) result = combine(result, values[w]);
    return result;
}

__device__ inline int block_count(bool flag) {
    return block_combine(__popc(__ballot_sync(kAllLanes, flag)), [](int a, int b) { return a + b; });
}

// Number of set flags in the threads before this one; `total` grows by the block's.
__device__ inline int block_flags_before(bool flag, int &total) {
    __shared__ int counts[kWarp];
    const unsigned flags = __ballot_sync(kAllLanes, flag);
    __syncthreads();
    if (lane_index() == 0) counts[warp_index()] = __popc(flags);
    __syncthreads();
    int before = total + __popc(flags & ((1u << lane_index()) - 1));
    for (int w = 0; w < blockDim.x / kWarp; ++w) {
        before += w < warp_index() ? counts[w] : 0;
        total += counts[w];
    }
    return before;
}

// Rank of this thread's value among `count` values in descending order, ties by index. Called by all threads of a block;
// `index` may lie outside. Every value above or equal to a qualifying one qualifies too, so none needs to be left out.
__device__ inline int block_rank(const float *values, int count, int index) {
    __shared__ float tile[1024];
    const float own = index < count ? values[index] : 0;
    int rank = 0;
    for (int start = 0; start < count; start += blockDim.x) {
        __syncthreads();
        if (start + threadIdx.x < count) tile[threadIdx.x] = values[start + threadIdx.x];
        __syncthreads();
        const int end = min(static_cast<int>(blockDim.x), count - start);
        for (int j = 0; j < end; ++j) rank += tile[j] > own || (tile[j] == own && start + j < index);
    }
    return rank;
}

inline unsigned block_threads(int64_t items) {
    const int64_t threads = ceil_div(items, kWarp) * kWarp;
    return static_cast<unsigned>(threads < 64 ? 64 : threads > 1024 ? 1024 : threads);
}

}  // namespace algm::cuda

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

// Calls function(T{}, width of a pack as an integral constant): 16 bytes where pointers and rows allow it, else 1
// value.
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
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

__device__ inline float warp_max(float value) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

__device__ inline int lane_index() { return threadIdx.x % kWarp; }
__device__ inline int warp_index() { return threadIdx.x / kWarp; }
__device__ inline unsigned lanes_below() { return (1u << lane_index()) - 1; }

// Set flags in the threads before this one; `total` grows by all of the block's. Called by all threads.
__device__ inline int block_flags_before(bool flag, int &total) {
    __shared__ int counts[kWarp];
    const unsigned flags = __ballot_sync(kAllLanes, flag);
    __syncthreads();
    if (lane_index() == 0) counts[warp_index()] = __popc(flags);
    __syncthreads();
    const int own = lane_index() < blockDim.x / kWarp ? counts[lane_index()] : 0;
    int sum = own;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int below = __shfl_up_sync(kAllLanes, sum, offset);
        sum += lane_index() >= offset ? below : 0;
    }
    const int before = total + __shfl_sync(kAllLanes, sum - own, warp_index()) + __popc(flags & lanes_below());
    total += __shfl_sync(kAllLanes, sum, kWarp - 1);
    return before;
}

// The smallest of one value a warp. Called by all threads.
__device__ inline int block_min(int warp_value) {
    __shared__ int values[kWarp];
    __syncthreads();
    if (lane_index() == 0) values[warp_index()] = warp_value;
    __syncthreads();
    return warp_min(values[lane_index() < blockDim.x / kWarp ? lane_index() : 0]);
}

// Four neighbouring threads rank one value, so that a block ranks blockDim.x / 4 at a time.
constexpr int kRankers = 4;

// Rank of values[index] among `count` values in descending order, ties by index; the same for the four threads that
// pass this index, which may lie outside. Called by all threads. Where a value qualifies, so does every one that ranks
// above it, so none needs to be left out.
__device__ inline int block_rank(const float *values, int count, int index) {
    constexpr int kTile = 1024;
    __shared__ float4 tile[kTile / 4];
    const float own = index < count ? values[index] : 0;
    int rank = 0;
    for (int start = 0; start < count; start += kTile) {
        __syncthreads();
        for (int j = threadIdx.x; j < kTile; j += blockDim.x)
            reinterpret_cast<float *>(tile)[j] = start + j < count ? values[start + j] : -INFINITY;
        __syncthreads();
        const int quads = (min(kTile, count - start) + 3) / 4;
        for (int q = threadIdx.x % kRankers; q < quads; q += kRankers) {
            const float four[4] = {tile[q].x, tile[q].y, tile[q].z, tile[q].w};
#pragma unroll
            for (int v = 0; v < 4; ++v) rank += four[v] > own || (four[v] == own && start + 4 * q + v < index);
        }
    }
    for (int offset = 1; offset < kRankers; offset *= 2) rank += __shfl_xor_sync(kAllLanes, rank, offset);
    return rank;
}

// Where the row count of the longest image is gathered: zeroed by the kernel before the decision, raised by each image.
struct RowCount {
    int64_t *rows, *plan_rows;
    int32_t *rows_int32;  // may be null

    __device__ void clear() const {
        if (rows == nullptr) return;
        *rows = *plan_rows = 0;
        if (rows_int32 != nullptr) *rows_int32 = 0;
    }

    __device__ void raise(int length) const {
        atomicMax(reinterpret_cast<unsigned long long *>(rows), static_cast<unsigned long long>(length));
        atomicMax(reinterpret_cast<unsigned long long *>(plan_rows), static_cast<unsigned long long>(length));
        if (rows_int32 != nullptr) atomicMax(rows_int32, length);
    }

    int clear_on(cudaStream_t stream) const {
        cudaError_t error = cudaMemsetAsync(rows, 0, sizeof(int64_t), stream);
        if (error == cudaSuccess) error = cudaMemsetAsync(plan_rows, 0, sizeof(int64_t), stream);
        if (error == cudaSuccess && rows_int32 != nullptr)
            error = cudaMemsetAsync(rows_int32, 0, sizeof(int32_t), stream);
        return status_of(error);
    }
};

inline unsigned block_threads(int64_t items) {
    const int64_t threads = ceil_div(items, kWarp) * kWarp;
    return static_cast<unsigned>(threads < 64 ? 64 : threads > 1024 ? 1024 : threads);
}

}  // namespace algm::cuda

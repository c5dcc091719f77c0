// Token types, 16-byte accesses and the warp and block primitives of the CUDA kernels.
#pragma once

#include "../common.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace algm::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }

// A failed call also leaves its error for whoever asks for the last one; it has been told here and is taken back, so
// that nobody else takes it for their own. For the same reason no launch asks for the last error: it says itself
// whether it started.
inline int status_of(cudaError_t error) {
    if (error == cudaSuccess) return ALGM_OK;
    cudaGetLastError();
    return ALGM_DEVICE_ERROR + error;
}

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute, int *value) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
    return status_of(error);
}

// A kernel may start while the one before it in the stream still runs (sm_90 and later). Up to wait_for_previous it may
// then only read what was there before that other kernel started; earlier GPUs start it afterwards, and nothing waits.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start once all blocks of this one came here, if that was launched early.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

constexpr int64_t kMaxBlocksBeside = 65535;  // in the y and z dimensions of a grid

// A kernel's grid, and the shared memory that it asks for beside what it declares.
struct Blocks {
    dim3 grid;
    unsigned threads;
    int shared_bytes = 0;

    cudaLaunchConfig_t on(void *stream) const {
        cudaLaunchConfig_t config = {};
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.stream = stream_of(stream);
        return config;
    }
};

// Starts a kernel as it is.
template <class... Parameters, class... Arguments>
int start(void (*kernel)(Parameters...), const Blocks &blocks, void *stream, Arguments... arguments) {
    const cudaLaunchConfig_t config = blocks.on(stream);
    return status_of(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// Starts a kernel of a merge. EARLY: it calls wait_for_previous. What counts is the architecture it was compiled for:
// code for an older one that the driver translated has nothing that waits. LARGEST: the shared memory of every launch
// of this kernel, where that is more than kernels have without asking. What is asked for holds for the kernel on this
// device, in all threads, so each asks for the same.
template <bool EARLY, int LARGEST = 0, class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), const Blocks &blocks, void *stream, Arguments... arguments) {
    cudaFuncAttributes attributes = {};
    cudaError_t error = EARLY ? cudaFuncGetAttributes(&attributes, kernel) : cudaSuccess;
    // A multiprocessor that divides cache and shared memory anew has to empty first: the same way for all kernels.
    if (error == cudaSuccess)
        error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxL1);
    if (error == cudaSuccess && LARGEST > 0)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, LARGEST);
    if (error != cudaSuccess) return status_of(error);
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = blocks.on(stream);
    config.attrs = &overlap;
    config.numAttrs = attributes.ptxVersion >= 90;
    return status_of(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

template <class Params>
int check_batch(const Params *params) {
    if (const int status = check(params)) return status;
    return params->batch > kMaxBlocksBeside ? ALGM_UNSUPPORTED : ALGM_OK;
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

__device__ inline float inverse_norm(float squares) { return 1.0f / fmaxf(sqrtf(squares), kNormEps); }

__device__ inline int lane_index() { return threadIdx.x % kWarp; }
__device__ inline int warp_index() { return threadIdx.x / kWarp; }
__device__ inline unsigned lanes_below() { return (1u << lane_index()) - 1; }

// Rows of the images before one, by their lengths. Called by all lanes, with the same image.
__device__ inline int rows_before(const int64_t *length, int image) {
    int rows = 0;
    for (int i = lane_index(); i < image; i += kWarp) rows += static_cast<int>(length[i]);
    return warp_sum(rows);
}

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

// A tile of neighbouring rows of a ragged image: which image, the row among all where it starts and how many it has, and
// the tile's first row in it. Tiles behind the last image belong to one more, of the rows that nobody has.
struct RaggedTile {
    int image, start, count, first;
};

// The tile number `tile` of `size` rows, where every image has `more` rows than its length. Called by all lanes.
__device__ inline RaggedTile ragged_tile(const int64_t *length, int images, int more, int tile, int size) {
    int start = 0;
    for (int before = 0; before < images; before += kWarp) {
        const int lane = lane_index(), own = before + lane < images ? static_cast<int>(length[before + lane]) + more : 0;
        const int own_tiles = (own + size - 1) / size;
        int rows = own, tiles = own_tiles;  // up to this lane's image
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const int below = __shfl_up_sync(kAllLanes, rows, offset);
            const int tiles_below = __shfl_up_sync(kAllLanes, tiles, offset);
            rows += lane >= offset ? below : 0;
            tiles += lane >= offset ? tiles_below : 0;
        }
        const unsigned behind = __ballot_sync(kAllLanes, tile < tiles);
        if (behind != 0) {
            const int at = __ffs(behind) - 1;
            return {before + at, start + __shfl_sync(kAllLanes, rows - own, at), __shfl_sync(kAllLanes, own, at),
                    (tile - __shfl_sync(kAllLanes, tiles - own_tiles, at)) * size};
        }
        start += __shfl_sync(kAllLanes, rows, kWarp - 1);
        tile -= __shfl_sync(kAllLanes, tiles, kWarp - 1);
    }
    return {images, start, 0, tile * size};
}

// As many tiles as `rows` rows of ragged images can need.
inline int64_t ragged_tiles(int64_t images, int64_t rows, int64_t size) { return ceil_div(rows, size) + images; }

// The smallest of one value a warp. Called by all threads.
__device__ inline int block_min(int warp_value) {
    __shared__ int values[kWarp];
    __syncthreads();
    if (lane_index() == 0) values[warp_index()] = warp_value;
    __syncthreads();
    return warp_min(values[lane_index() < blockDim.x / kWarp ? lane_index() : 0]);
}

// Eight neighbouring threads rank one value, so that a block ranks blockDim.x / 8 at a time.
constexpr int kRankers = 8;

// Rank of values[index] among `count` values in descending order, ties by index; the same for the eight threads that
// pass this index, which may lie outside. Called by whole warps. Where a value qualifies, so does every one that ranks
// above it, so none needs to be left out.
__device__ inline int rank_of(const float *values, int count, int index) {
    const float own = index < count ? values[index] : INFINITY;
    int rank = 0, j = threadIdx.x % kRankers;
#pragma unroll 4
    for (; j < min(index, count); j += kRankers) rank += values[j] >= own;
#pragma unroll 4
    for (; j < count; j += kRankers) rank += values[j] > own;
    for (int offset = 1; offset < kRankers; offset *= 2) rank += __shfl_xor_sync(kAllLanes, rank, offset);
    return rank;
}

// Where the row count of the longest image, or of all images, is gathered: zeroed by the kernel before the decision, raised
// by one block an image. The last of them tells the caller, whose memory may be the host's, a microsecond or more away for each access.
struct RowCount {
    int64_t *rows, *plan_rows;
    int32_t *rows_int32;  // may be null
    int32_t *raised;      // images that raised it
    bool adds;            // up the rows of all images

    __device__ void clear() const {
        if (rows != nullptr) *plan_rows = *raised = 0;
    }

    __device__ void raise(int length) const {
        auto *gathered = reinterpret_cast<unsigned long long *>(plan_rows);
        if (adds)
            atomicAdd(gathered, static_cast<unsigned long long>(length));
        else
            atomicMax(gathered, static_cast<unsigned long long>(length));
        __threadfence();
        if (atomicAdd(raised, 1) + 1 < static_cast<int>(gridDim.x)) return;
        __threadfence();
        const int64_t counted = *const_cast<volatile int64_t *>(plan_rows);
        *rows = counted;
        if (rows_int32 != nullptr) *rows_int32 = static_cast<int32_t>(counted);
    }
};

// What `decide` leaves for `apply` in both merges.
struct MergePlan {
    int64_t *rows;     // (1) S' or S'', or all of ragged results
    int64_t *length;   // (B)
    int32_t *raised;   // (1) images that raised rows
    int32_t *new_row;  // (B,S) output row of every input row; what is negative or kNoRow is told by the plans
    bool ragged;       // results

    template <class Params>
    MergePlan(const Params &p, Carver &carver)
        : rows(carver.take<int64_t>(1)),
          length(carver.take<int64_t>(p.batch)),
          raised(carver.take<int32_t>(1)),
          new_row(carver.take<int32_t>(p.batch * most_rows(p))),
          ragged(writes_ragged(p.ragged)) {}

    RowCount count(int64_t *out_rows, int32_t *rows_int32) const { return {out_rows, rows, rows_int32, raised, ragged}; }
};

static __global__ void clear_kernel(RowCount count) {
    let_next_start();
    count.clear();
}

inline int clear_on(void *stream, const RowCount &count) {
    return launch<false>(clear_kernel, {dim3(1), 1}, stream, count);
}

inline unsigned block_threads(int64_t items) {
    const int64_t threads = ceil_div(items, kWarp) * kWarp;
    return static_cast<unsigned>(threads < 64 ? 64 : threads > 1024 ? 1024 : threads);
}

}  // namespace algm::cuda

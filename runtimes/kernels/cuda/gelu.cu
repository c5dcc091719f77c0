// GELU of the product of a linear layer and its bias.
#include "device.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kRows = 8, kThreads = 256;

__device__ inline float gelu_of(float x, float) { return 0.5f * x * erfcf(x * -0.70710678f); }

// For 16-bit results, by Abramowitz and Stegun's 7.1.26, which is off by no more than 1.5e-7: erfc(u) for u >= 0 is
// exp(-u * u) times a polynomial in 1 / (1 + 0.3275911 u).
template <class T>
__device__ float gelu_of(float x, T) {
    const float u = fabsf(x) * 0.70710678f, t = __fdividef(1.0f, fmaf(0.3275911f, u, 1.0f));
    float sum = fmaf(t, 1.061405429f, -1.453152027f);
    sum = fmaf(t, sum, 1.421413741f);
    sum = fmaf(t, sum, -0.284496736f);
    sum = fmaf(t, sum, 0.254829592f) * t;
    const float half = 0.5f * sum * __expf(-u * u);
    return x * (x < 0 ? half : 1 - half);
}

// A thread has the same columns of some rows, so it reads their bias once.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    gelu_kernel(int rows, int packs, const T *product, const float *bias, T *out) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= packs) return;
    float shift[V];
#pragma unroll
    for (int v = 0; v < V; ++v) shift[v] = bias[column * V + v];
    const int first = blockIdx.x * kRows;
    Pack<T, V> values[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        if (first + i < rows) values[i] = load_pack<T, V>(product, int64_t{first + i} * packs + column);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if (first + i >= rows) break;
#pragma unroll
        for (int v = 0; v < V; ++v)
            values[i].value[v] = from_float<T>(gelu_of(to_float(values[i].value[v]) + shift[v], T{}));
        reinterpret_cast<Pack<T, V> *>(out)[int64_t{first + i} * packs + column] = values[i];
    }
}

}  // namespace

int algm_cuda_gelu(const algm_gelu_params *params, const void *product, const float *bias, void *out, void *stream) {
    if (const int status = check(params)) return status;
    const algm_gelu_params &p = *params;
    if (is_missing(product, p.rows) || any_null(bias) || is_missing(out, p.rows)) return ALGM_INVALID_ARGUMENT;
    if (p.rows == 0) return ALGM_OK;
    const bool aligned = is_aligned(product) && is_aligned(out);
    return with_dtype(p.dtype, p.width, aligned, [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int V = decltype(pack)::value;
        const int64_t packs = p.width / V, beside = ceil_div(packs, kThreads);
        if (beside > kMaxBlocksBeside) return static_cast<int>(ALGM_UNSUPPORTED);
        const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, kRows)), static_cast<unsigned>(beside));
        const unsigned threads = static_cast<unsigned>(ceil_div(ceil_div(packs, beside), kWarp) * kWarp);
        return start(gelu_kernel<T, V>, {grid, threads}, stream, static_cast<int>(p.rows), static_cast<int>(packs),
                     static_cast<const T *>(product), bias, static_cast<T *>(out));
    });
}

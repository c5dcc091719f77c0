// deformable_attention: what queries find at their own places of a few grids.
#include "../sampling.hpp"
#include "device.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr unsigned kThreads = 256;

// One thread V neighbouring values of a query's head; the threads of a head share its places through the cache.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    deformable_kernel(Levels levels, int threads, int queries, int heads, int packs, int cells, const T *value,
                      const float *locations, const float *shares, T *out) {
    const int index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= threads) return;
    const int place = index / packs, head = place % heads, places = levels.count * levels.points;
    const int64_t image = blockIdx.y, of_image = image * queries * heads;
    const T *column = value + (image * cells * heads + head) * packs * V;
    locations += 2 * (of_image + place) * places;
    shares += (of_image + place) * places;
    float total[V] = {};
    for (int l = 0; l < levels.count; ++l)
#pragma unroll 2
        for (int i = 0; i < levels.points; ++i, locations += 2, ++shares) {
            const Corners corners(levels.level[l], locations[0], locations[1], *shares);
            Pack<T, V> found[4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                found[c] = corners.cell[c] < 0 ? Pack<T, V>{}
                                               : load_pack<T, V>(column, corners.cell[c] * heads * packs + index % packs);
#pragma unroll
            for (int c = 0; c < 4; ++c)
#pragma unroll
                for (int v = 0; v < V; ++v) total[v] = fmaf(corners.share[c], to_float(found[c].value[v]), total[v]);
        }
    Pack<T, V> written;
#pragma unroll
    for (int v = 0; v < V; ++v) written.value[v] = from_float<T>(total[v]);
    reinterpret_cast<Pack<T, V> *>(out)[of_image * packs + index] = written;
}

template <class T, int V>
int launch_packs(const algm_deformable_attention_params &p, const void *value, const float *locations,
                 const float *shares, void *out, void *stream) {
    const int64_t packs = p.width / V, threads = p.queries * p.heads * packs;
    const dim3 grid(static_cast<unsigned>(ceil_div(threads, kThreads)), static_cast<unsigned>(p.batch));
    return start(deformable_kernel<T, V>, {grid, kThreads}, stream, Levels(p), static_cast<int>(threads),
                 static_cast<int>(p.queries), static_cast<int>(p.heads), static_cast<int>(packs),
                 static_cast<int>(p.cells), static_cast<const T *>(value),
                 locations, shares, static_cast<T *>(out));
}

// The largest pack up to V that divides a head and both addresses.
template <class T, int V>
int launch_deformable(const algm_deformable_attention_params &p, const void *value, const float *locations,
                      const float *shares, void *out, void *stream) {
    if constexpr (V > 1) {
        const uint64_t odd = reinterpret_cast<uintptr_t>(value) | reinterpret_cast<uintptr_t>(out) |
                             static_cast<uint64_t>(p.width) * sizeof(T);
        if (odd % (V * sizeof(T)) != 0) return launch_deformable<T, V / 2>(p, value, locations, shares, out, stream);
    }
    return launch_packs<T, V>(p, value, locations, shares, out, stream);
}

}  // namespace

int algm_cuda_deformable_attention(const algm_deformable_attention_params *params, const void *value,
                                   const float *locations, const float *shares, void *out, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(value, locations, shares, out)) return ALGM_INVALID_ARGUMENT;
    return with_dtype(params->dtype, 1, false, [&](auto type, auto) {
        using T = decltype(type);
        return launch_deformable<T, 16 / sizeof(T)>(*params, value, locations, shares, out, stream);
    });
}

// Bias, residual and layer normalisation behind the product of a linear layer.
#include "device.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kWarps = 4;  // of a block; each has a row

// As many neighbouring values of parameters.
template <int V>
struct Parameters {
    float value[V];

    __device__ Parameters(const float *from, int pack) {
        constexpr int kAtOnce = V % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int v = 0; v < V; v += kAtOnce) {
            const auto read = load_pack<float, kAtOnce>(from + int64_t{pack} * V + v, 0);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) value[v + i] = read.value[i];
        }
    }
};

// A lane has every 32nd pack of its warp's row. KEPT: as many as it holds in registers; 0: any number, which it reads
// again from where they are. Without a bias nothing is added, without a weight nothing is normalised.
template <class T, int V, int KEPT>
__global__ void __launch_bounds__(kWarps *kWarp)
    norm_kernel(int rows, int packs, float epsilon, const T *product, const float *bias, const T *residual,
                const float *weight, const float *shift, T *normed, T *total) {
    const int row = blockIdx.x * kWarps + warp_index();
    if (row >= rows) return;
    const int64_t first = int64_t{row} * packs;
    const float width = static_cast<float>(int64_t{packs} * V);
    Pack<T, V> kept[KEPT > 0 ? KEPT : 1];
    auto visit = [&](auto &&each) {
        if constexpr (KEPT > 0) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i)
                if (lane_index() + i * kWarp < packs) each(lane_index() + i * kWarp, kept[i]);
        } else {
            for (int pack = lane_index(); pack < packs; pack += kWarp) {
                Pack<T, V> again = load_pack<T, V>(bias == nullptr ? product : total, first + pack);
                each(pack, again);
            }
        }
    };
    auto add = [&](int pack) {
        Pack<T, V> sum = load_pack<T, V>(product, first + pack);
        if (bias == nullptr) return sum;
        const Pack<T, V> before = load_pack<T, V>(residual, first + pack);
        const Parameters<V> added(bias, pack);
#pragma unroll
        for (int v = 0; v < V; ++v)
            sum.value[v] = from_float<T>(to_float(before.value[v]) + (to_float(sum.value[v]) + added.value[v]));
        reinterpret_cast<Pack<T, V> *>(total)[first + pack] = sum;
        return sum;
    };
    if constexpr (KEPT > 0) {
        visit([&](int pack, Pack<T, V> &values) { values = add(pack); });
    } else if (bias != nullptr) {
        for (int pack = lane_index(); pack < packs; pack += kWarp) add(pack);
    }
    if (weight == nullptr) return;
    float sum = 0, squares = 0;
    visit([&](int, const Pack<T, V> &values) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum += to_float(values.value[v]);
    });
    const float mean = warp_sum(sum) / width;
    visit([&](int, const Pack<T, V> &values) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const float centred = to_float(values.value[v]) - mean;
            squares = fmaf(centred, centred, squares);
        }
    });
    const float scale = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
    visit([&](int pack, const Pack<T, V> &values) {
        const Parameters<V> gain(weight, pack), added(shift, pack);
        Pack<T, V> result;
#pragma unroll
        for (int v = 0; v < V; ++v)
            result.value[v] =
                from_float<T>(fmaf((to_float(values.value[v]) - mean) * scale, gain.value[v], added.value[v]));
        reinterpret_cast<Pack<T, V> *>(normed)[first + pack] = result;
    });
}

// Calls function(how many packs a lane holds), 0 where that is too many.
template <class Function>
int with_kept(int64_t packs, Function function) {
    switch (ceil_div(packs, kWarp)) {
        case 1: return function(Constant<1>{});
        case 2: return function(Constant<2>{});
        case 3: return function(Constant<3>{});
        case 4: return function(Constant<4>{});
        case 5:
        case 6: return function(Constant<6>{});
        default: return function(Constant<0>{});
    }
}

}  // namespace

int algm_cuda_bias_skip_norm(const algm_bias_skip_norm_params *params, const void *product, const float *bias,
                              const void *residual, const float *weight, const float *shift, void *normed, void *total,
                              void *stream) {
    if (const int status = check(params)) return status;
    const algm_bias_skip_norm_params &p = *params;
    if (lacks_half(p, product, bias, residual, weight, shift, normed, total)) return ALGM_INVALID_ARGUMENT;
    if (p.rows == 0) return ALGM_OK;
    bool aligned = true;
    for (const void *one : {product, residual, static_cast<const void *>(normed), static_cast<const void *>(total),
                            static_cast<const void *>(bias), static_cast<const void *>(weight),
                            static_cast<const void *>(shift)})
        aligned = aligned && is_aligned(one);
    const Blocks blocks{dim3(static_cast<unsigned>(ceil_div(p.rows, kWarps))), kWarps * kWarp};
    return with_dtype(p.dtype, p.width, aligned, [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int V = decltype(pack)::value;
        const int64_t packs = p.width / V;
        return with_kept(packs, [&](auto kept) {
            return start(norm_kernel<T, V, decltype(kept)::value>, blocks, stream, static_cast<int>(p.rows),
                         static_cast<int>(packs), p.epsilon, static_cast<const T *>(product), bias,
                         static_cast<const T *>(residual), weight, shift, static_cast<T *>(normed),
                         static_cast<T *>(total));
        });
    });
}

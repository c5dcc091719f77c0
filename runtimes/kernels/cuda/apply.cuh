// The gather-mean that carries out a merge plan, for clap and gbm.
#pragma once

#include "device.cuh"

namespace algm::cuda {

struct ApplyShape {
    int rows_in, width;
    int64_t rows_out;  // ALGM_ROWS_ON_DEVICE: counted_rows holds it
    const int64_t *counted_rows, *length;
    const int32_t *source;
    bool weighted;
};

constexpr int kMemberList = 64;  // members of a merge that a warp looks at before it adds them up
constexpr int kApplyWarps = 8;

// sum / weight correctly rounded, from the correctly rounded inverse: one product and one correction (Markstein 1990).
__device__ inline float divide(float sum, float weight, float inverse) {
    const float quotient = sum * inverse;
    return fmaf(fmaf(-quotient, weight, sum), inverse, quotient);
}

// One warp a strip of an output row, a pack a lane. `members.visit(image, merge, list, add)` writes the rows of a merge
// to `list` and calls add(count) whenever it has some; all lanes of a warp visit together.
template <class T, int V, class Members>
__global__ void __launch_bounds__(kApplyWarps *kWarp, 5)  // five blocks: enough loads in flight
    apply_kernel(ApplyShape shape, Members members, int bound, int strips, const T *tokens, const float *size,
                 T *out_tokens, float *out_size) {
    __shared__ int lists[kApplyWarps][kMemberList];
    const int unit = blockIdx.x * kApplyWarps + warp_index();
    if (unit >= bound * strips) return;
    const int row = Members::kLongRowsLast ? bound - 1 - unit / strips : unit / strips;
    // Last image first: decide read the images in order, so the last ones are still in the cache.
    const int image = gridDim.y - 1 - blockIdx.y;
    // Three loads that do not wait for each other; a source past the image's length is never used.
    const int64_t rows_out = shape.rows_out == ALGM_ROWS_ON_DEVICE ? *shape.counted_rows : shape.rows_out;
    const bool exists = row < shape.length[image];
    const int32_t source = row < shape.rows_in ? shape.source[int64_t{image} * shape.rows_in + row] : 0;
    if (row >= rows_out) return;

    const int packs = shape.width / V, pack = unit % strips * kWarp + lane_index();
    const bool active = pack < packs;
    tokens += int64_t{image} * shape.rows_in * shape.width;
    size += int64_t{image} * shape.rows_in;
    Pack<T, V> result;
    float total = 0;
    if (exists && source >= 0) {
        if (active) result = load_pack<T, V>(tokens + int64_t{source} * shape.width, pack);
        total = size[source];
    } else if (exists) {
        float sum[V] = {}, weight = 0;
        int *list = lists[warp_index()];
        const auto add = [&](int count) {
            for (int start = 0; start < count; start += Members::kTogether) {
                Pack<T, V> values[Members::kTogether];
                float sizes[Members::kTogether];
#pragma unroll
                for (int m = 0; m < Members::kTogether; ++m) {  // past the end: the last member once more, not counted
                    const int member = list[min(start + m, count - 1)];
                    sizes[m] = start + m < count ? size[member] : 0.0f;
                    values[m] = load_pack<T, V>(tokens + int64_t{member} * shape.width, active ? pack : 0);
                }
#pragma unroll
                for (int m = 0; m < Members::kTogether; ++m) {
                    const float w = shape.weighted ? sizes[m] : start + m < count ? 1.0f : 0.0f;
                    weight += w;
                    total += sizes[m];
#pragma unroll
                    for (int v = 0; v < V; ++v) sum[v] = fmaf(w, to_float(values[m].value[v]), sum[v]);
                }
            }
        };
        members.visit(image, -1 - source, list, add);
        const float inverse = __frcp_rn(weight);
#pragma unroll
        for (int v = 0; v < V; ++v) result.value[v] = from_float<T>(weight > 0 ? divide(sum[v], weight, inverse) : 0.0f);
    } else {
#pragma unroll
        for (int v = 0; v < V; ++v) result.value[v] = from_float<T>(0.0f);
    }
    const int64_t out_row = image * rows_out + row;
    if (active) reinterpret_cast<Pack<T, V> *>(out_tokens + out_row * shape.width)[pack] = result;
    if (pack == 0) out_size[out_row] = total;
}

template <class Members>
int launch_apply(int32_t dtype, int64_t batch, const ApplyShape &shape, const Members &members, const void *tokens,
                 const float *size, void *out_tokens, float *out_size, void *stream) {
    if (shape.rows_out < 1 && shape.rows_out != ALGM_ROWS_ON_DEVICE) return ALGM_INVALID_ARGUMENT;
    // An output never has more rows than the input, unless the caller asked for more padding.
    const int64_t bound = shape.rows_out == ALGM_ROWS_ON_DEVICE ? shape.rows_in : shape.rows_out;
    return with_dtype(dtype, shape.width, is_aligned(tokens) && is_aligned(out_tokens), [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int V = decltype(pack)::value;
        const int64_t strips = ceil_div(shape.width, V * kWarp);
        if (bound * strips > INT32_MAX - kApplyWarps) return static_cast<int>(ALGM_UNSUPPORTED);
        const dim3 grid(static_cast<unsigned>(ceil_div(bound * strips, kApplyWarps)), static_cast<unsigned>(batch));
        apply_kernel<T, V><<<grid, kApplyWarps * kWarp, 0, stream_of(stream)>>>(
            shape, members, static_cast<int>(bound), static_cast<int>(strips), static_cast<const T *>(tokens), size,
            static_cast<T *>(out_tokens), out_size);
        return launched();
    });
}

}  // namespace algm::cuda

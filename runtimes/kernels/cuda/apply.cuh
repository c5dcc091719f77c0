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

// One warp an output row. Its values stay in registers, kPacks packs a lane at a time, while the members are visited.
// `members.visit(b, merge, add)` calls add(row) for every member; all lanes of a warp visit together.
template <class T, int V, class Members>
__global__ void apply_kernel(ApplyShape shape, Members members, const T *tokens, const float *size, T *out_tokens,
                             float *out_size) {
    constexpr int kPacks = 4;
    const int64_t rows_out = shape.rows_out == ALGM_ROWS_ON_DEVICE ? *shape.counted_rows : shape.rows_out;
    const int64_t row = int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp_index();
    if (row >= rows_out) return;
    // Last image first: decide read the images in order, so the last ones are still in the cache.
    const int b = gridDim.y - 1 - blockIdx.y;
    const int lane = lane_index(), packs = shape.width / V;
    const bool exists = row < shape.length[b];
    const int32_t source = exists ? shape.source[int64_t{b} * shape.rows_in + row] : 0;
    tokens += int64_t{b} * shape.rows_in * shape.width;
    size += int64_t{b} * shape.rows_in;
    out_tokens += (b * rows_out + row) * shape.width;
    out_size += b * rows_out + row;

    for (int start = 0; start < packs; start += kPacks * kWarp) {
        float sum[kPacks][V] = {};
        float weight = 0, total = 0;
        const auto add = [&](int member) {
            const float members_size = size[member], w = shape.weighted ? members_size : 1.0f;
            weight += w;
            total += members_size;
#pragma unroll
            for (int i = 0; i < kPacks; ++i) {
                const int pack = start + i * kWarp + lane;
                if (pack >= packs) break;
                const Pack<T, V> values = load_pack<T, V>(tokens + int64_t{member} * shape.width, pack);
#pragma unroll
                for (int v = 0; v < V; ++v) sum[i][v] += w * to_float(values.value[v]);
            }
        };
        Pack<T, V> copies[kPacks];
        if (exists && source < 0) {
            members.visit(b, -1 - source, add);
#pragma unroll
            for (int i = 0; i < kPacks; ++i)
#pragma unroll
                for (int v = 0; v < V; ++v) copies[i].value[v] = from_float<T>(weight > 0 ? sum[i][v] / weight : 0.0f);
        } else {
            total = exists ? size[source] : 0.0f;
#pragma unroll
            for (int i = 0; i < kPacks; ++i) {
                const int pack = start + i * kWarp + lane;
                if (exists && pack < packs) {
                    copies[i] = load_pack<T, V>(tokens + int64_t{source} * shape.width, pack);
                } else {
#pragma unroll
                    for (int v = 0; v < V; ++v) copies[i].value[v] = from_float<T>(0.0f);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
            const int pack = start + i * kWarp + lane;
            if (pack < packs) reinterpret_cast<Pack<T, V> *>(out_tokens)[pack] = copies[i];
        }
        if (start == 0 && lane == 0) *out_size = total;
    }
}

template <class Members>
int launch_apply(int32_t dtype, int64_t batch, const ApplyShape &shape, const Members &members, const void *tokens,
                 const float *size, void *out_tokens, float *out_size, void *stream) {
    if (shape.rows_out < 1 && shape.rows_out != ALGM_ROWS_ON_DEVICE) return ALGM_INVALID_ARGUMENT;
    constexpr int kRows = 8;
    // An output never has more rows than the input, unless the caller asked for more padding.
    const int64_t bound = shape.rows_out == ALGM_ROWS_ON_DEVICE ? shape.rows_in : shape.rows_out;
    const dim3 grid(static_cast<unsigned>(ceil_div(bound, kRows)), static_cast<unsigned>(batch));
    return with_dtype(dtype, shape.width, is_aligned(tokens) && is_aligned(out_tokens), [&](auto type, auto pack) {
        using T = decltype(type);
        apply_kernel<T, decltype(pack)::value><<<grid, kRows * kWarp, 0, stream_of(stream)>>>(
            shape, members, static_cast<const T *>(tokens), size, static_cast<T *>(out_tokens), out_size);
        return launched();
    });
}

}  // namespace algm::cuda

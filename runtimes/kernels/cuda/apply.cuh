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
// A multiprocessor of sm_75 holds 1024 threads, later ones 1536 or more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostBlocks = 4;
#else
constexpr int kMostBlocks = 6;
#endif
constexpr int64_t kManyRows = 8192;  // about two waves of warps on a large GPU

// sum / weight correctly rounded, from the correctly rounded inverse: one product and one correction (Markstein 1990).
__device__ inline float divide(float sum, float weight, float inverse) {
    const float quotient = sum * inverse;
    return fmaf(fmaf(-quotient, weight, sum), inverse, quotient);
}

// One warp a span of packs of an output row: whole rows where there are many, shorter spans where a batch is too small
// to fill the device. Members says how many rows and packs are loaded together and how many blocks a multiprocessor
// must hold, a matter of loads in flight against registers. `members.visit(image, merge, list, add)` writes the rows of
// a merge to `list` and calls add(count) whenever it has some; all lanes of a warp visit together.
template <class T, int V, class Members>
__global__ void __launch_bounds__(kApplyWarps *kWarp, Members::kBlocks < kMostBlocks ? Members::kBlocks : kMostBlocks)
    apply_kernel(ApplyShape shape, Members members, int bound, int spans, int span, const T *tokens, const float *size,
                 T *out_tokens, float *out_size) {
    __shared__ int lists[kApplyWarps][kMemberList];
    const int unit = blockIdx.x * kApplyWarps + warp_index();
    if (unit >= bound * spans) return;
    const int row = Members::kLongRowsLast ? bound - 1 - unit / spans : unit / spans;
    // Last image first: decide read the images in order, so the last ones are still in the cache.
    const int image = gridDim.y - 1 - blockIdx.y;
    // Three loads that do not wait for each other; a source past the image's length is never used.
    const int64_t rows_out = shape.rows_out == ALGM_ROWS_ON_DEVICE ? *shape.counted_rows : shape.rows_out;
    const bool exists = row < shape.length[image];
    const int32_t source = row < shape.rows_in ? shape.source[int64_t{image} * shape.rows_in + row] : 0;
    if (row >= rows_out) return;

    const int begin = unit % spans * span, end = min(begin + span, shape.width / V);
    const int64_t out_row = image * rows_out + row;
    tokens += int64_t{image} * shape.rows_in * shape.width;
    size += int64_t{image} * shape.rows_in;
    auto *out = reinterpret_cast<Pack<T, V> *>(out_tokens + out_row * shape.width);
    float total = 0;
    if (exists && source >= 0) {
        const T *from = tokens + int64_t{source} * shape.width;
#pragma unroll 4
        for (int pack = begin + lane_index(); pack < end; pack += kWarp) out[pack] = load_pack<T, V>(from, pack);
        total = size[source];
    } else if (exists) {
        constexpr int kMembers = Members::kTogether, kPacks = Members::kPacks;
        for (int first = begin; first < end; first += kPacks * kWarp) {
            int packs[kPacks];
#pragma unroll
            for (int i = 0; i < kPacks; ++i)  // lanes past the end repeat the last pack
                packs[i] = min(first + i * kWarp + lane_index(), end - 1);
            float sum[kPacks][V] = {}, weight = 0;
            int *list = lists[warp_index()];
            total = 0;
            const auto add = [&](int count) {
                for (int start = 0; start < count; start += kMembers) {
                    Pack<T, V> values[kMembers][kPacks];
                    float sizes[kMembers];
#pragma unroll
                    for (int m = 0; m < kMembers; ++m) {  // past the end: the last member, not counted
                        const int member = list[min(start + m, count - 1)];
                        const T *from = tokens + int64_t{member} * shape.width;
                        sizes[m] = start + m < count ? size[member] : 0.0f;
#pragma unroll
                        for (int i = 0; i < kPacks; ++i) values[m][i] = load_pack<T, V>(from, packs[i]);
                    }
#pragma unroll
                    for (int m = 0; m < kMembers; ++m) {
                        const float w = shape.weighted ? sizes[m] : start + m < count ? 1.0f : 0.0f;
                        weight += w;
                        total += sizes[m];
#pragma unroll
                        for (int i = 0; i < kPacks; ++i)
#pragma unroll
                            for (int v = 0; v < V; ++v) sum[i][v] = fmaf(w, to_float(values[m][i].value[v]), sum[i][v]);
                    }
                }
            };
            members.visit(image, -1 - source, list, add);
            const float inverse = __frcp_rn(weight);
#pragma unroll
            for (int i = 0; i < kPacks; ++i) {
                Pack<T, V> mean;
#pragma unroll
                for (int v = 0; v < V; ++v)
                    mean.value[v] = from_float<T>(weight > 0 ? divide(sum[i][v], weight, inverse) : 0.0f);
                out[packs[i]] = mean;
            }
            __syncwarp();
        }
    } else {
        Pack<T, V> zeros;
#pragma unroll
        for (int v = 0; v < V; ++v) zeros.value[v] = from_float<T>(0.0f);
        for (int pack = begin + lane_index(); pack < end; pack += kWarp) out[pack] = zeros;
    }
    if (begin == 0 && lane_index() == 0) out_size[out_row] = total;
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
        const int64_t packs = shape.width / V, short_spans = ceil_div(packs, kWarp);
        const int64_t spans = batch * bound < kManyRows ? short_spans : 1;
        const int64_t span = spans == 1 ? packs : kWarp;
        if (bound * spans > INT32_MAX - kApplyWarps) return static_cast<int>(ALGM_UNSUPPORTED);
        const dim3 grid(static_cast<unsigned>(ceil_div(bound * spans, kApplyWarps)), static_cast<unsigned>(batch));
        apply_kernel<T, V><<<grid, kApplyWarps * kWarp, 0, stream_of(stream)>>>(
            shape, members, static_cast<int>(bound), static_cast<int>(spans), static_cast<int>(span),
            static_cast<const T *>(tokens), size, static_cast<T *>(out_tokens), out_size);
        return launched();
    });
}

}  // namespace algm::cuda

// What the gather-means of clap and gbm share: output rows, weighted means, padding.
//
// Both kernels go through the input: a warp loads the rows it is responsible for before it knows what becomes of them,
// which the decision may still be working on; then it looks up the plan and writes.
#pragma once

#include "device.cuh"

namespace algm::cuda {

constexpr int kApplyWarps = 8;
constexpr int kGroup = 4;      // rows that a warp holds at a time
constexpr int kSpanPacks = 2;  // packs of each that a lane holds
constexpr int kSpan = kSpanPacks * kWarp;
constexpr int kNoRow = INT32_MAX;

struct ApplyShape {
    int most, rows_in, width;  // rows that an image can have, and those of the array that each has
    int64_t rows_out;          // as `apply` was given it
    const int64_t *counted_rows, *length;
    const int64_t *ragged_in;  // lengths of ragged tokens, else null
    bool ragged_out;
};

// The bits of a pack. As values of 16 bits the compiler would give them a register each.
template <int BYTES>
struct BitsOf {
    using Type = uint4;
};
template <>
struct BitsOf<4> {
    using Type = uint32_t;
};
template <>
struct BitsOf<2> {
    using Type = uint16_t;
};
template <class T, int V>
using Bits = typename BitsOf<sizeof(T) * V>::Type;

// sum / weight correctly rounded, from the correctly rounded inverse: one product and one correction (Markstein 1990),
// which would make an infinite quotient NaN.
__device__ inline float divide(float sum, float weight, float inverse) {
    const float quotient = sum * inverse;
    const float corrected = fmaf(fmaf(-quotient, weight, sum), inverse, quotient);
    return isinf(quotient) ? quotient : corrected;
}

// The weighted mean of packs, in the order in which they are added.
template <class T, int V>
struct Mean {
    float sum[V] = {}, weight = 0;

    __device__ void add(const Bits<T, V> &bits, float w) {
        const Pack<T, V> values = reinterpret_cast<const Pack<T, V> &>(bits);
        weight += w;
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] = fmaf(w, to_float(values.value[v]), sum[v]);
    }

    __device__ Bits<T, V> value() const {
        const float inverse = __frcp_rn(weight);
        Pack<T, V> mean;
#pragma unroll
        for (int v = 0; v < V; ++v) mean.value[v] = from_float<T>(weight > 0 ? divide(sum[v], weight, inverse) : 0.0f);
        return reinterpret_cast<const Bits<T, V> &>(mean);
    }
};

// One image's rows, of which a warp handles one span of packs.
template <class T, int V>
struct Rows {
    const Bits<T, V> *tokens;
    const float *size;
    Bits<T, V> *out_tokens;
    float *out_size;
    int start, rows_in;         // among the rows of all images
    int packs, first;           // first pack of this lane
    // Set by find_output. Where the output has not room for all rows, which nobody knew before, it gets none of them:
    // it is all padding, of NaN instead of zeros.
    int pad_from, pad_shift, pad_end;  // where input rows of these indices write padding, and where that ends
    float padding;

    // Called by all lanes, as is find_output.
    __device__ Rows(const ApplyShape &shape, int image, int span, const T *tokens, const float *size)
        : start(shape.ragged_in == nullptr ? image * shape.rows_in : rows_before(shape.ragged_in, image)),
          rows_in(shape.ragged_in == nullptr
                      ? shape.rows_in
                      : static_cast<int>(existing_rows(shape.ragged_in[image], shape.most))),
          packs(shape.width / V),
          first(span * kSpan + lane_index()) {
        this->tokens = reinterpret_cast<const Bits<T, V> *>(tokens + int64_t{start} * shape.width);
        this->size = size + start;
    }

    __device__ void find_output(const ApplyShape &shape, int image, T *tokens, float *size) {
        const int all = static_cast<int>(*shape.counted_rows), images = gridDim.y;
        const int64_t counted = shape.ragged_out ? mean_rows(all, images) : all;
        const int rows_out = static_cast<int>(output_rows(shape.rows_out, counted, shape.rows_in));
        const bool fits = rows_out >= counted;
        padding = fits ? 0 : NAN;
        int first_row = image * rows_out;
        pad_from = fits ? static_cast<int>(shape.length[image]) : 0;
        pad_shift = 0;
        pad_end = rows_out;
        if (shape.ragged_out) {  // what is left lies behind the last image, and every image pads its share
            first_row = fits ? rows_before(shape.length, image) : 0;
            pad_from = 0;
            pad_shift = (fits ? all : 0) + image * max(rows_out, shape.most) - first_row;
            pad_end = images * rows_out - first_row;
        }
        out_tokens = reinterpret_cast<Bits<T, V> *>(tokens + int64_t{first_row} * shape.width);
        out_size = size + first_row;
    }

    __device__ bool has_room() const { return padding == 0; }

    __device__ bool has(int row, int i) const { return row < rows_in && first + i * kWarp < packs; }

    __device__ Bits<T, V> load(int row, int i) const { return tokens[int64_t{row} * packs + first + i * kWarp]; }

    __device__ void store(int row, int i, const Bits<T, V> &values) const {
        if (first + i * kWarp < packs) out_tokens[int64_t{row} * packs + first + i * kWarp] = values;
    }

    // The first `lanes` lanes write a size each, if this is the first span.
    __device__ void store_size(int row, float total, int lanes) const {
        if (first < lanes) out_size[row] = total;
    }

    // Output rows past the image's last one are padding; the warp that loads an input row writes the row of that index.
    // Called by all lanes, of which the first kGroup pass a row each.
    __device__ void write_padding(int lane_row) const {
        Pack<T, V> pack;
#pragma unroll
        for (int v = 0; v < V; ++v) pack.value[v] = from_float<T>(padding);
        const Bits<T, V> values = reinterpret_cast<const Bits<T, V> &>(pack);
        const bool is_padding = lane_index() < kGroup && lane_row >= pad_from && lane_row < pad_end - pad_shift;
        for (unsigned left = __ballot_sync(kAllLanes, is_padding); left != 0; left &= left - 1) {
            const int row = __shfl_sync(kAllLanes, lane_row, __ffs(left) - 1) + pad_shift;
            for (int i = 0; i < kSpanPacks; ++i) store(row, i, values);
            store_size(row, padding, 1);
        }
    }
};

// Calls launch(T{}, width of a pack, blocks, spans of a row) so that a warp handles one span of one item.
template <class Launch>
int with_apply_grid(int32_t dtype, int64_t width, int64_t items, bool aligned, Launch launch) {
    return with_dtype(dtype, width, aligned, [&](auto type, auto pack) {
        const int64_t spans = ceil_div(width / decltype(pack)::value, kSpan);
        if (items * spans > INT32_MAX - kApplyWarps) return static_cast<int>(ALGM_UNSUPPORTED);
        return launch(type, pack, static_cast<unsigned>(ceil_div(items * spans, kApplyWarps)), static_cast<int>(spans));
    });
}

}  // namespace algm::cuda

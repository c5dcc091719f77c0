// unmerge and label_map: what turns the scores of merged tokens back into a picture.
#include "../interpolation.hpp"
#include "device.cuh"

#include <cfloat>

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kCopyWarps = 8;

// One warp a patch copies its row, whose bytes are a whole number of words; a row that does not exist is zeros.
template <class Word>
__global__ void unmerge_kernel(int64_t total, int64_t patches, int64_t rows, int words, int64_t prefix,
                               const Word *values, const int64_t *map, Word *out) {
    const int64_t patch = int64_t{blockIdx.x} * kCopyWarps + warp_index();
    if (patch >= total) return;
    const int64_t row = map[patch] - prefix;
    const bool exists = row >= 0 && row < rows;
    const Word *from = values + (patch / patches * rows + (exists ? row : 0)) * words;
    out += patch * words;
#pragma unroll 4
    for (int w = lane_index(); w < words; w += kWarp) out[w] = exists ? from[w] : Word{};
}

template <class Word>
int launch_unmerge(const algm_unmerge_params &p, const void *values, const int64_t *map, void *out, void *stream) {
    const int64_t total = p.batch * p.patches, words = p.width * dtype_bytes(p.dtype) / static_cast<int64_t>(sizeof(Word));
    unmerge_kernel<<<static_cast<unsigned>(ceil_div(total, kCopyWarps)), kCopyWarps * kWarp, 0, stream_of(stream)>>>(
        total, p.patches, p.rows, static_cast<int>(words), p.prefix, static_cast<const Word *>(values), map,
        static_cast<Word *>(out));
    return launched();
}

constexpr int kSide = 16;      // a warp labels a square of 16 x 16 pixels: two lanes a column,
constexpr int kPixels = 8;     // eight pixels a lane
constexpr int kGroup = 4;      // classes whose maximum is formed before it is compared with the best so far
constexpr int kMaxList = 256;  // candidates held at a time
constexpr int kCellWarps = 4;  // warps of a block

struct Shape {
    Axis down, across;
    int rows, classes, prefix, parts_y, parts_x, list;
    int64_t warps;  // images x cells x parts of a cell
};

// The steps of one class inside one cell. Each value is formed by the same three fused multiply-adds wherever it is
// needed, so that the class of a maximum can be found again by comparing bits.
__device__ inline float upper_at(float4 c, float fx) { return fmaf(fx, c.y, c.x); }
__device__ inline float lower_at(float4 c, float fx) { return fmaf(fx, c.w, c.z); }
__device__ inline float value_at(float upper, float lower, float fy) { return fmaf(fy, lower - upper, upper); }

// The best class of a lane's pixels so far.
struct Labels {
    float best[kPixels];
    int label[kPixels];

    // Goes through `count` candidates (a multiple of kGroup) in ascending class order.
    __device__ void take(const float4 *planes, const int32_t *classes, int count, float fx, const float (&fy)[kPixels]) {
        int group[kPixels];
#pragma unroll
        for (int r = 0; r < kPixels; ++r) group[r] = -1;
        for (int g = 0; g < count; g += kGroup) {
            float top[kPixels];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                const float4 plane = planes[g + i];
                const float upper = upper_at(plane, fx), lower = lower_at(plane, fx);
#pragma unroll
                for (int r = 0; r < kPixels; ++r) {
                    const float value = value_at(upper, lower, fy[r]);
                    top[r] = i == 0 ? value : fmaxf(top[r], value);
                }
            }
#pragma unroll
            for (int r = 0; r < kPixels; ++r)
                if (top[r] > best[r]) {
                    best[r] = top[r];
                    group[r] = g;
                }
        }
#pragma unroll
        for (int r = 0; r < kPixels; ++r) {
            if (group[r] < 0) continue;
            for (int i = kGroup - 1; i >= 0; --i) {  // downwards: the lowest class of equals is written last
                const float4 plane = planes[group[r] + i];
                if (value_at(upper_at(plane, fx), lower_at(plane, fx), fy[r]) == best[r])
                    label[r] = classes[group[r] + i];
            }
        }
    }
};

// The scores of the four patches around a cell; a row that the map should not name reads as zeros.
template <class T>
struct Corners {
    const T *row[4];

    __device__ Corners(const Shape &shape, const T *scores, const int64_t *map, int cy, int cx) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int y = shape.down.patch(cy + i / 2), x = shape.across.patch(cx + i % 2);
            const int64_t from = map[int64_t{y} * shape.across.cells + x] - shape.prefix;
            row[i] = from >= 0 && from < shape.rows ? scores + from * shape.classes : nullptr;
        }
    }

    __device__ float4 at(int k) const {
        const auto one = [&](int i) { return row[i] == nullptr ? 0.0f : to_float(row[i][k]); };
        return make_float4(one(0), one(1), one(2), one(3));
    }
};

__device__ inline float lowest(float4 c) { return fminf(fminf(c.x, c.y), fminf(c.z, c.w)); }
__device__ inline float highest(float4 c) { return fmaxf(fmaxf(c.x, c.y), fmaxf(c.z, c.w)); }
__device__ inline bool has_nan(float4 c) { return isnan(c.x + c.y + c.z + c.w); }

// What a class must reach at some corner to win anywhere in the cell: interpolated values stay between the corners, so a
// class whose highest corner lies below the lowest corner of another is out; the margin covers their rounding.
template <class T>
__device__ float corner_bound(const Corners<T> &corners, int classes) {
    float bound = -INFINITY, largest = 0;
    for (int k = lane_index(); k < classes; k += kWarp) {
        const float4 c = corners.at(k);
        if (has_nan(c)) continue;
        bound = fmaxf(bound, lowest(c));
        largest = fmaxf(largest, fmaxf(highest(c), -lowest(c)));
    }
    return warp_max(bound) - kInterpolationMargin * warp_max(largest);
}

// One warp a part of a cell: the classes that can win there go to a list in shared memory, then every pixel takes the
// maximum over the list. A list that is full is worked off first.
template <class T, class Label>
__global__ void __launch_bounds__(kCellWarps *kWarp) label_kernel(Shape shape, const T *scores, const int64_t *map, Label *labels) {
    extern __shared__ float4 shared[];
    float4 *planes = shared + warp_index() * shape.list;
    int32_t *classes = reinterpret_cast<int32_t *>(shared + kCellWarps * shape.list) + warp_index() * shape.list;
    int64_t index = int64_t{blockIdx.x} * kCellWarps + warp_index();
    if (index >= shape.warps) return;
    const auto next_digit = [&](int base) {
        const int digit = static_cast<int>(index % base);
        index /= base;
        return digit;
    };
    const int cx = next_digit(shape.across.cells + 1) - 1, part_x = next_digit(shape.parts_x);
    const int cy = next_digit(shape.down.cells + 1) - 1, part_y = next_digit(shape.parts_y);
    const int x0 = shape.across.first_pixel(cx) + part_x * kSide, x_end = shape.across.first_pixel(cx + 1);
    const int y0 = shape.down.first_pixel(cy) + part_y * kSide, y_end = shape.down.first_pixel(cy + 1);
    if (x0 >= x_end || y0 >= y_end) return;

    const int lane = lane_index(), x = x0 + lane % kSide, y = y0 + lane / kSide * kPixels;
    const float fx = shape.across.fraction(x, cx);
    float fy[kPixels];
    Labels found;
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
        fy[r] = shape.down.fraction(y + r, cy);
        found.best[r] = -INFINITY;
        found.label[r] = 0;
    }
    const Corners<T> corners(shape, scores + index * shape.rows * shape.classes,
                             map + index * shape.down.cells * shape.across.cells, cy, cx);
    const float bound = corner_bound(corners, shape.classes);
    int count = 0;
    const auto work_off = [&]() {
        const int padded = (count + kGroup - 1) / kGroup * kGroup;
        if (lane < padded - count) {
            planes[count + lane] = make_float4(-FLT_MAX, 0, -FLT_MAX, 0);
            classes[count + lane] = 0;
        }
        __syncwarp();
        found.take(planes, classes, padded, fx, fy);
        __syncwarp();
        count = 0;
    };
    for (int start = 0; start < shape.classes; start += kWarp) {
        if (count + kWarp > shape.list) work_off();
        const int k = start + lane;
        const float4 c = k < shape.classes ? corners.at(k) : make_float4(0, 0, 0, 0);
        const bool keep = k < shape.classes && !has_nan(c) && highest(c) >= bound;
        const unsigned kept = __ballot_sync(kAllLanes, keep);
        if (keep) {
            const int at = count + __popc(kept & lanes_below());
            planes[at] = make_float4(c.x, c.y - c.x, c.z, c.w - c.z);
            classes[at] = k;
        }
        count += __popc(kept);
    }
    work_off();
    if (x >= x_end) return;
    labels += (index * shape.down.pixels + y) * shape.across.pixels + x;
#pragma unroll
    for (int r = 0; r < kPixels; ++r)
        if (y + r < y_end) labels[int64_t{r} * shape.across.pixels] = static_cast<Label>(found.label[r]);
}

// Squares needed to cover the longest cell of an axis. Rounding can lengthen a cell by one pixel where the ratio is odd,
// which no multiple of 16 is.
int parts_of(const Axis &axis) {
    const int ratio = axis.pixels / axis.cells;
    return static_cast<int>(ceil_div(axis.pixels % axis.cells == 0 ? ratio + ratio % 2 : ratio + 2, kSide));
}

template <class T, class Label>
int launch_labels(const algm_label_map_params &p, const void *scores, const int64_t *map, void *labels, void *stream) {
    Shape shape = {Axis(p.grid_h, p.height),
                   Axis(p.grid_w, p.width),
                   static_cast<int>(p.rows),
                   static_cast<int>(p.classes),
                   static_cast<int>(p.prefix),
                   0,
                   0,
                   0,
                   0};
    shape.parts_y = parts_of(shape.down);
    shape.parts_x = parts_of(shape.across);
    const int64_t list = ceil_div(p.classes, kWarp) * kWarp;
    shape.list = static_cast<int>(list < kMaxList ? list : kMaxList);
    shape.warps = p.batch * (p.grid_h + 1) * (p.grid_w + 1) * shape.parts_y * shape.parts_x;
    const int64_t blocks = ceil_div(shape.warps, kCellWarps);
    if (blocks > INT32_MAX) return ALGM_UNSUPPORTED;
    const size_t shared = kCellWarps * shape.list * (sizeof(float4) + sizeof(int32_t));
    label_kernel<T, Label><<<static_cast<unsigned>(blocks), kCellWarps * kWarp, shared, stream_of(stream)>>>(
        shape, static_cast<const T *>(scores), map, static_cast<Label *>(labels));
    return launched();
}

}  // namespace

int algm_cuda_unmerge(const algm_unmerge_params *params, const void *values, const int64_t *map, void *out,
                      void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(values, map, out)) return ALGM_INVALID_ARGUMENT;
    const algm_unmerge_params &p = *params;
    // The largest word that divides a row and both addresses.
    const uint64_t odd = reinterpret_cast<uintptr_t>(values) | reinterpret_cast<uintptr_t>(out) |
                         static_cast<uint64_t>(p.width * dtype_bytes(p.dtype));
    if (odd % 16 == 0) return launch_unmerge<uint4>(p, values, map, out, stream);
    if (odd % 8 == 0) return launch_unmerge<uint2>(p, values, map, out, stream);
    if (odd % 4 == 0) return launch_unmerge<uint32_t>(p, values, map, out, stream);
    return launch_unmerge<uint16_t>(p, values, map, out, stream);
}

int algm_cuda_label_map(const algm_label_map_params *params, const void *scores, const int64_t *map, void *labels,
                        void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(scores, map, labels)) return ALGM_INVALID_ARGUMENT;
    return with_dtype(params->dtype, 1, false, [&](auto type, auto) {
        using T = decltype(type);
        return params->label_type == ALGM_LABEL_UINT8 ? launch_labels<T, uint8_t>(*params, scores, map, labels, stream)
                                                      : launch_labels<T, int32_t>(*params, scores, map, labels, stream);
    });
}

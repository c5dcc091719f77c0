// unmerge and label_map: what turns the scores of merged tokens back into a picture.
#include "../interpolation.hpp"
#include "device.cuh"

#include <cfloat>

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kCopyWarps = 8, kCopyPatches = 4;

// One warp copies the rows of four patches, word by word; a row that does not exist is zeros.
template <class Word>
__global__ void unmerge_kernel(int64_t total, int64_t patches, int64_t rows, int words, int64_t prefix,
                               const Word *values, const int64_t *map, Word *out) {
    const int64_t first = (int64_t{blockIdx.x} * kCopyWarps + warp_index()) * kCopyPatches;
    const Word *from[kCopyPatches];
#pragma unroll
    for (int i = 0; i < kCopyPatches; ++i) {
        const int64_t patch = first + i, row = patch < total ? map[patch] - prefix : -1;
        from[i] = row >= 0 && row < rows ? values + (patch / patches * rows + row) * words : nullptr;
    }
    for (int w = lane_index(); w < words; w += kWarp) {
        Word copied[kCopyPatches];
#pragma unroll
        for (int i = 0; i < kCopyPatches; ++i) copied[i] = from[i] == nullptr ? Word{} : from[i][w];
#pragma unroll
        for (int i = 0; i < kCopyPatches; ++i)
            if (first + i < total) out[(first + i) * words + w] = copied[i];
    }
}

template <class Word>
int launch_unmerge(const algm_unmerge_params &p, const void *values, const int64_t *map, void *out, void *stream) {
    const int64_t total = p.batch * p.patches,
                  words = p.width * dtype_bytes(p.dtype) / static_cast<int64_t>(sizeof(Word));
    const unsigned blocks = static_cast<unsigned>(ceil_div(total, kCopyWarps * kCopyPatches));
    return start(unmerge_kernel<Word>, {dim3(blocks), kCopyWarps * kWarp}, stream, total, p.patches, p.rows,
                 static_cast<int>(words), p.prefix, static_cast<const Word *>(values), map, static_cast<Word *>(out));
}

constexpr int kSide = 16;     // a warp labels a square of 16 x 16 pixels of one cell,
constexpr int kRegion = 8;    // in four regions of 8 x 8,
constexpr int kPixels = 2;    // two neighbours of a column a lane
constexpr int kGroup = 4;     // classes whose maximum is formed before it is compared with the best so far
constexpr int kMaxWarps = 4;  // warps of a block
constexpr int64_t kSharedBytes = 48 * 1024;

struct Shape {
    Axis down, across;
    int rows, classes, prefix, first, end, parts_y, parts_x, warps_per_block;  // lines from `first` up to `end`
    int64_t warps;  // images x cells x parts of a cell

    // Every warp holds the planes of all classes and one of a class that never wins, then two lists of classes.
    __host__ __device__ int planes() const { return classes + 1; }
    __host__ __device__ int list() const { return (classes + kGroup - 1) / kGroup * kGroup; }
    __host__ __device__ int64_t bytes_per_warp() const {
        return (planes() * sizeof(float4) + 2 * list() * sizeof(uint16_t) + 15) / 16 * 16;
    }
};

// One class inside one cell: the scores of the two left corners and the steps to the right ones, as x, z and y, w. Each
// value is formed by the same operations wherever it is needed, so that the class of a maximum can be found again by
// comparing bits.
struct Plane {
    float4 c;

    __device__ float upper(float fx) const { return fmaf(fx, c.y, c.x); }
    __device__ float lower(float fx) const { return fmaf(fx, c.w, c.z); }
    __device__ static float between(float upper, float lower, float fy) { return fmaf(fy, lower - upper, upper); }
    __device__ float at(float fx, float fy) const { return between(upper(fx), lower(fx), fy); }
};

struct Range {
    float low, high;
};

__device__ inline Range range_of(float a, float b, float c, float d) {
    return {fminf(fminf(a, b), fminf(c, d)), fmaxf(fmaxf(a, b), fmaxf(c, d))};
}

// Lowest and highest value of a plane in a whole cell and in a rectangle of it: interpolation is linear along each
// axis, so both lie at corners.
struct Cell {
    __device__ Range operator()(const Plane &plane) const {
        return range_of(plane.c.x, plane.c.z, plane.c.x + plane.c.y, plane.c.z + plane.c.w);
    }
};

struct Rectangle {
    Range fx, fy;

    __device__ Range operator()(const Plane &plane) const {
        const float upper_left = plane.upper(fx.low), lower_left = plane.lower(fx.low);
        const float upper_right = plane.upper(fx.high), lower_right = plane.lower(fx.high);
        return range_of(Plane::between(upper_left, lower_left, fy.low), Plane::between(upper_left, lower_left, fy.high),
                        Plane::between(upper_right, lower_right, fy.low),
                        Plane::between(upper_right, lower_right, fy.high));
    }
};

// Fills a warp's planes from the scores of the four patches around a cell; a row that the map should not name reads as
// zeros. Returns the largest score, which scales the rounding errors.
template <class T>
__device__ float load_planes(const Shape &shape, const T *scores, const int64_t *map, int cy, int cx, float4 *planes) {
    const T *row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int y = shape.down.patch(cy + i / 2), x = shape.across.patch(cx + i % 2);
        const int64_t from = map[int64_t{y} * shape.across.cells + x] - shape.prefix;
        row[i] = from >= 0 && from < shape.rows ? scores + from * shape.classes : nullptr;
    }
    const float4 loser = make_float4(-FLT_MAX, 0, -FLT_MAX, 0);
    float largest = 0;
#pragma unroll 2
    for (int k = lane_index(); k < shape.planes(); k += kWarp) {
        float c[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = k < shape.classes && row[i] != nullptr ? to_float(row[i][k]) : 0.0f;
        const bool valid = k < shape.classes && isfinite(c[0] + c[1] + c[2] + c[3]);
        planes[k] = valid ? make_float4(c[0], c[1] - c[0], c[2], c[3] - c[2]) : loser;
        if (valid) largest = fmaxf(largest, fmaxf(fmaxf(fabsf(c[0]), fabsf(c[1])), fmaxf(fabsf(c[2]), fabsf(c[3]))));
    }
    __syncwarp();
    return warp_max(largest);
}

// Lists those of `count` classes that can win somewhere in an area, in ascending order; returns how many. `class_at`
// gives the classes to look at, `range` a class's lowest and highest value in the area. A class is out when its highest
// value lies below the lowest of another; the margin covers the rounding of both.
template <class ClassAt, class RangeIn>
__device__ int list_candidates(const float4 *planes, int count, ClassAt class_at, RangeIn range, float margin,
                               uint16_t *list) {
    float bound = -INFINITY;
#pragma unroll 2
    for (int i = lane_index(); i < count; i += kWarp) bound = fmaxf(bound, range({planes[class_at(i)]}).low);
    bound = warp_max(bound) - margin;
    int listed = 0;
#pragma unroll 2
    for (int start = 0; start < count; start += kWarp) {
        const int i = start + lane_index(), k = class_at(min(i, count - 1));
        const bool keep = i < count && range({planes[k]}).high >= bound;
        const unsigned kept = __ballot_sync(kAllLanes, keep);
        if (keep) list[listed + __popc(kept & lanes_below())] = static_cast<uint16_t>(k);
        listed += __popc(kept);
    }
    __syncwarp();
    return listed;
}

// Fills a list's last group with the class that never wins.
__device__ inline int pad_list(uint16_t *list, int count, int never) {
    const int padded = (count + kGroup - 1) / kGroup * kGroup;
    if (lane_index() < padded - count) list[count + lane_index()] = static_cast<uint16_t>(never);
    __syncwarp();
    return padded;
}

// The best class of a lane's pixels among `count` listed ones; ties go to the lower class.
__device__ inline void best_classes(const float4 *planes, const uint16_t *list, int count, float fx,
                                    const float (&fy)[kPixels], int (&label)[kPixels]) {
    float best[kPixels];
    int group[kPixels];
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
        best[r] = -INFINITY;
        group[r] = 0;
        label[r] = 0;
    }
#pragma unroll 2
    for (int g = 0; g < count; g += kGroup) {
        const ushort4 members = *reinterpret_cast<const ushort4 *>(list + g);
        const int classes[kGroup] = {members.x, members.y, members.z, members.w};
        float top[kPixels];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            const Plane plane = {planes[classes[i]]};
            const float upper = plane.upper(fx), lower = plane.lower(fx);
#pragma unroll
            for (int r = 0; r < kPixels; ++r) {
                const float value = Plane::between(upper, lower, fy[r]);
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
    for (int r = 0; r < kPixels; ++r)
#pragma unroll
        for (int i = kGroup - 1; i >= 0; --i) {  // downwards: the lowest class of equals is written last
            const int k = list[group[r] + i];
            if (Plane{planes[k]}.at(fx, fy[r]) == best[r]) label[r] = k;
        }
}

// One warp a part of a cell.
template <class T, class Label>
__global__ void __launch_bounds__(kMaxWarps *kWarp)
    label_kernel(Shape shape, const T *scores, const int64_t *map, Label *labels) {
    extern __shared__ __align__(16) unsigned char shared[];
    float4 *planes = reinterpret_cast<float4 *>(shared + warp_index() * shape.bytes_per_warp());
    uint16_t *list = reinterpret_cast<uint16_t *>(planes + shape.planes());
    int64_t index = int64_t{blockIdx.x} * shape.warps_per_block + warp_index();
    if (index >= shape.warps) return;
    const auto next_digit = [&](int base) {
        const int digit = static_cast<int>(index % base);
        index /= base;
        return digit;
    };
    const int cx = next_digit(shape.across.cells + 1) - 1, part_x = next_digit(shape.parts_x);
    const int cy = next_digit(shape.down.cells + 1) - 1, part_y = next_digit(shape.parts_y);
    const int x0 = shape.across.first_pixel(cx) + part_x * kSide;
    const int y0 = max(shape.down.first_pixel(cy), shape.first) + part_y * kSide;
    const int x_end = min(x0 + kSide, shape.across.first_pixel(cx + 1));
    const int y_end = min(min(y0 + kSide, shape.down.first_pixel(cy + 1)), shape.end);
    if (x0 >= x_end || y0 >= y_end) return;

    const int64_t image = index;
    const float margin =
        kInterpolationMargin * load_planes(shape, scores + image * shape.rows * shape.classes,
                                           map + image * shape.down.cells * shape.across.cells, cy, cx, planes);
    uint16_t *in_cell = list + shape.list();
    const int cell_count = list_candidates(planes, shape.classes, [](int i) { return i; }, Cell{}, margin, in_cell);
    labels += (image * (shape.end - shape.first) - shape.first) * shape.across.pixels;
    for (int top = y0; top < y_end; top += kRegion)
        for (int left = x0; left < x_end; left += kRegion) {
            const int bottom = min(top + kRegion, y_end) - 1, right = min(left + kRegion, x_end) - 1;
            const int x = left + lane_index() % kRegion, y = top + lane_index() / kRegion * kPixels;
            int label[kPixels] = {in_cell[0], in_cell[0]};
            if (cell_count > 1) {  // inside an object there often is but one
                const Rectangle rectangle = {{shape.across.fraction(left, cx), shape.across.fraction(right, cx)},
                                             {shape.down.fraction(top, cy), shape.down.fraction(bottom, cy)}};
                const int count =
                    list_candidates(planes, cell_count, [&](int i) { return in_cell[i]; }, rectangle, margin, list);
                const float fy[kPixels] = {shape.down.fraction(y, cy), shape.down.fraction(y + 1, cy)};
                best_classes(planes, list, pad_list(list, count, shape.classes), shape.across.fraction(x, cx), fy,
                             label);
                __syncwarp();  // the list is about to be overwritten
            }
#pragma unroll
            for (int r = 0; r < kPixels; ++r)
                if (x <= right && y + r <= bottom)
                    labels[int64_t{y + r} * shape.across.pixels + x] = static_cast<Label>(label[r]);
        }
}

// Squares needed to cover the longest cell of an axis. Rounding can lengthen a cell by one pixel where the ratio is
// odd, which no multiple of 16 is.
int parts_of(const Axis &axis) {
    const int ratio = axis.pixels / axis.cells;
    return static_cast<int>(ceil_div(axis.pixels % axis.cells == 0 ? ratio + ratio % 2 : ratio + 2, kSide));
}

template <class T, class Label>
int launch_labels(const algm_label_map_params &p, const void *scores, const int64_t *map, void *labels, void *stream) {
    Shape shape = {Axis(p.grid_h, p.height), Axis(p.grid_w, p.width)};
    shape.rows = static_cast<int>(p.rows);
    shape.classes = static_cast<int>(p.classes);
    shape.prefix = static_cast<int>(p.prefix);
    shape.first = static_cast<int>(p.first);
    shape.end = static_cast<int>(p.first + p.lines);
    const int64_t fitting = kSharedBytes / shape.bytes_per_warp();
    if (fitting == 0) return ALGM_UNSUPPORTED;
    shape.warps_per_block = static_cast<int>(fitting < kMaxWarps ? fitting : kMaxWarps);
    shape.parts_y = parts_of(shape.down);
    shape.parts_x = parts_of(shape.across);
    shape.warps = p.batch * (p.grid_h + 1) * (p.grid_w + 1) * shape.parts_y * shape.parts_x;
    const int64_t blocks = ceil_div(shape.warps, shape.warps_per_block);
    if (blocks > INT32_MAX) return ALGM_UNSUPPORTED;
    const Blocks all = {dim3(static_cast<unsigned>(blocks)), static_cast<unsigned>(shape.warps_per_block * kWarp),
                        static_cast<int>(shape.warps_per_block * shape.bytes_per_warp())};
    return start(label_kernel<T, Label>, all, stream, shape, static_cast<const T *>(scores), map,
                 static_cast<Label *>(labels));
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

// mask_labels: from masks and class probabilities of queries to labels, of which nothing but the labels is written.
#include "../interpolation.hpp"
#include "tensor.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

// One call: where its masks lie, and which pixels of them are labelled.
struct Plan {
    Axis down, across;
    int queries, classes, first, lines;

    explicit Plan(const algm_mask_labels_params &p)
        : down(p.grid_h, p.height),
          across(p.grid_w, p.width),
          queries(static_cast<int>(p.queries)),
          classes(static_cast<int>(p.classes)),
          first(static_cast<int>(p.first)),
          lines(static_cast<int>(p.lines)) {}

    __device__ int cells() const { return down.cells * across.cells; }
    template <class T>
    __device__ const T *masks_of(const T *masks, int image) const {
        return masks + int64_t{image} * queries * cells();
    }
    __device__ int64_t label_at(int image, int line, int column) const {
        return (int64_t{image} * lines + line) * across.pixels + column;
    }
};

// Where a pixel lies between two cells of an axis.
struct Place {
    int low, high;  // cells
    float weight;   // of the higher one

    __device__ Place(const Axis &axis, int pixel) {
        const int cell = axis.cell(pixel);
        low = axis.patch(cell);
        high = axis.patch(cell + 1);
        weight = axis.fraction(pixel, cell);
    }
};

__device__ inline float between(float low, float high, float weight) { return fmaf(high - low, weight, low); }

// What `sigmoid_of` takes for a mask.
constexpr float kExponent = -1.4426950408889634f;

__device__ inline float sigmoid_of(float exponent) {
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return __fdividef(1.0f, 1.0f + power);
}

// The better of two classes; the lower of equals.
struct Best {
    float score;
    int label;

    __device__ void take(float other, int its_label) {
        if (other > score || (other == score && its_label < label)) {
            score = other;
            label = its_label;
        }
    }
};

// ---- any sizes, any type --------------------------------------------------------------------------------------------

constexpr int kPlainWarps = 4;
constexpr int kPlainPixels = 8;                        // neighbours in a line, by one warp
constexpr int kPlainQueries = kWarp / kPlainPixels;    // whose sigmoids its lanes compute at once
constexpr int kPlainClasses = 4;                       // of a lane at a time

template <class T, class Label>
__global__ void __launch_bounds__(kPlainWarps *kWarp)
    plain_mask_kernel(Plan plan, int64_t warps, const T *masks, const float *classes, Label *labels) {
    const int64_t index = int64_t{blockIdx.x} * kPlainWarps + warp_index();
    if (index >= warps) return;
    const int parts = (plan.across.pixels + kPlainPixels - 1) / kPlainPixels;
    const int64_t row = index / parts;
    const int image = static_cast<int>(row / plan.lines), line = static_cast<int>(row % plan.lines);
    const int left = static_cast<int>(index % parts) * kPlainPixels, lane = lane_index();
    const int own_pixel = lane % kPlainPixels, own_query = lane / kPlainPixels;
    const Place y(plan.down, plan.first + line), x(plan.across, min(left + own_pixel, plan.across.pixels - 1));
    const T *from = plan.masks_of(masks, image);
    const int upper = y.low * plan.across.cells, lower = y.high * plan.across.cells;
    const float *shares = classes + int64_t{image} * plan.queries * plan.classes;

    Best best[kPlainPixels];
#pragma unroll
    for (int p = 0; p < kPlainPixels; ++p) best[p] = {-INFINITY, INT32_MAX};
    for (int start = 0; start < plan.classes; start += kWarp * kPlainClasses) {
        float sum[kPlainPixels][kPlainClasses] = {};
        for (int step = 0; step < plan.queries; step += kPlainQueries) {
            float covered = 0;
            if (step + own_query < plan.queries) {
                const T *mask = from + (step + own_query) * plan.cells();
                const float top = between(to_float(mask[upper + x.low]), to_float(mask[upper + x.high]), x.weight);
                const float bottom = between(to_float(mask[lower + x.low]), to_float(mask[lower + x.high]), x.weight);
                covered = sigmoid_of(kExponent * between(top, bottom, y.weight));
            }
#pragma unroll
            for (int q = 0; q < kPlainQueries; ++q) {
                const float *share = shares + min(step + q, plan.queries - 1) * plan.classes;
                float own[kPlainClasses];
#pragma unroll
                for (int i = 0; i < kPlainClasses; ++i) {
                    const int k = start + i * kWarp + lane;
                    own[i] = k < plan.classes && step + q < plan.queries ? share[k] : 0.0f;
                }
#pragma unroll
                for (int p = 0; p < kPlainPixels; ++p) {
                    const float there = __shfl_sync(kAllLanes, covered, q * kPlainPixels + p);
#pragma unroll
                    for (int i = 0; i < kPlainClasses; ++i) sum[p][i] = fmaf(own[i], there, sum[p][i]);
                }
            }
        }
#pragma unroll
        for (int p = 0; p < kPlainPixels; ++p)
#pragma unroll
            for (int i = 0; i < kPlainClasses; ++i)
                if (start + i * kWarp + lane < plan.classes) best[p].take(sum[p][i], start + i * kWarp + lane);
    }
#pragma unroll
    for (int p = 0; p < kPlainPixels; ++p) {
        for (int offset = kWarp / 2; offset > 0; offset /= 2)
            best[p].take(__shfl_xor_sync(kAllLanes, best[p].score, offset),
                         __shfl_xor_sync(kAllLanes, best[p].label, offset));
        // Where no sum is a number, any label of a class will do.
        if (lane == 0 && left + p < plan.across.pixels)
            labels[plan.label_at(image, line, left + p)] =
                static_cast<Label>(best[p].label < plan.classes ? best[p].label : 0);
    }
}

struct MaskLaunch {
    const algm_mask_labels_params &p;
    const void *masks;
    const float *classes;
    void *labels, *stream;

    template <class T, class Label>
    int plain() const {
        const int64_t warps = p.batch * p.lines * ceil_div(p.width, kPlainPixels), blocks = ceil_div(warps, kPlainWarps);
        if (blocks > INT32_MAX) return ALGM_UNSUPPORTED;
        return start(plain_mask_kernel<T, Label>, {dim3(static_cast<unsigned>(blocks)), kPlainWarps * kWarp}, stream,
                     Plan(p), warps, static_cast<const T *>(masks), classes, static_cast<Label *>(labels));
    }

    template <class T>
    int with_type() const {
        return p.label_type == ALGM_LABEL_UINT8 ? plain<T, uint8_t>() : plain<T, int32_t>();
    }
};

}  // namespace

int algm_cuda_mask_labels(const algm_mask_labels_params *params, const void *masks, const float *classes, void *labels,
                          void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(masks, classes, labels)) return ALGM_INVALID_ARGUMENT;
    const MaskLaunch launch = {*params, masks, classes, labels, stream};
    switch (params->dtype) {
        case ALGM_FLOAT16: return launch.with_type<__half>();
        case ALGM_BFLOAT16: return launch.with_type<__nv_bfloat16>();
        default: return launch.with_type<float>();
    }
}

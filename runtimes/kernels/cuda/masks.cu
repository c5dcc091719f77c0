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

// ---- on tensor cores ------------------------------------------------------------------------------------------------

// Products are those of numbers cut into two of bf16 each, high and low, without the two low ones: that keeps the range of
// fp32 and 16 binary digits of it, as tiny values decide where no query has a mask.
//
// A warp labels 32 neighbours of a line. It interpolates the two lines of cells around them to one, in shared memory, and
// computes sigmoids where the matrix instruction takes them, in registers; probabilities lie cut in shared memory, for as
// many classes as a warp has sums of in registers, and serve all pixels of a block.

constexpr int kMaskWarps = 8;
constexpr int kMaskPixels = 32;               // of a warp at a time
constexpr int kMaskStep = 16;                 // queries of one product
constexpr int kMaskTiles = 4;                 // times 32 pixels by a warp, one after the other
constexpr int kShareBytes = kMaskStep * 4;    // of a class in one step: 8 + 8 high parts, 8 + 8 low ones
constexpr int kMaskRows = kMaskPixels / 8;    // pixels of a lane

struct Tiling {
    int steps;   // of queries
    int stride;  // of cells in shared memory, in floats: 16 more than a multiple of all banks, so that neighbours differ
    int cells;   // most that 32 pixels lie between
    int strips;  // 32 pixels wide, of a picture
    int groups;  // of classes
    int tiles;   // of a warp

    Tiling(const algm_mask_labels_params &p, int classes)
        : steps(static_cast<int>(ceil_div(p.queries, kMaskStep))),
          stride(kMaskStep * (steps + (steps % 2 == 0))),
          strips(static_cast<int>(ceil_div(p.width, kMaskPixels))),
          groups(static_cast<int>(ceil_div(p.classes, classes))),
          tiles(groups == 1 ? kMaskTiles : 1) {
        const double between = static_cast<double>(kMaskPixels - 1) * p.grid_w / p.width;
        const int64_t most = static_cast<int64_t>(between + 0.5) + 3;  // with those at both ends, however places round
        cells = static_cast<int>(most < p.grid_w ? most : p.grid_w);
    }

    int64_t bytes(int classes) const {
        return int64_t{steps} * classes * kShareBytes + int64_t{kMaskWarps} * cells * stride * 4;
    }
    int64_t blocks(int64_t lines) const { return ceil_div(int64_t{strips} * lines, kMaskWarps * tiles); }
};

// Two numbers as bf16, and what they lack.
__device__ inline void cut(float first, float second, unsigned &high, unsigned &low) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(first, second);
    high = *reinterpret_cast<const unsigned *>(&rounded);
    const float2 there = to_floats(high, __nv_bfloat16{});
    const __nv_bfloat162 rest = __floats2bfloat162_rn(first - there.x, second - there.y);
    low = *reinterpret_cast<const unsigned *>(&rest);
}

// Where 16 bytes of a class in a step lie, of four: so that eight classes beside each other fill all banks.
__device__ inline int share_at(int step, int classes, int k, int chunk) {
    return (step * classes + k) * kShareBytes + (chunk ^ (k / 2 % 4)) * 16;
}

// Cuts the probabilities of CLASSES classes from `first` on; zeros for queries and classes that there are none of. The
// fourth of a step's queries which a lane computes are neighbours, so a product's order of queries is another: 0, 1, 4, 5,
// 8, 9, 12, 13, then 2, 3, 6, 7, 10, 11, 14, 15.
template <int CLASSES>
__device__ void cut_shares(const Plan &plan, int steps, const float *shares, int first, unsigned char *to) {
    for (int i = threadIdx.x; i < steps * (kMaskStep / 2) * CLASSES; i += blockDim.x) {
        const int k = i % CLASSES, q = i / CLASSES * 2, own = q % kMaskStep;
        const bool there = first + k < plan.classes;
        const float *from = shares + int64_t{q} * plan.classes + first + k;
        const float one = there && q < plan.queries ? from[0] : 0.0f;
        const float two = there && q + 1 < plan.queries ? from[plan.classes] : 0.0f;
        unsigned high, low;
        cut(one, two, high, low);
        const int chunk = own % 4 / 2, beside = own / 4 * 4;
        *reinterpret_cast<unsigned *>(to + share_at(q / kMaskStep, CLASSES, k, chunk) + beside) = high;
        *reinterpret_cast<unsigned *>(to + share_at(q / kMaskStep, CLASSES, k, chunk + 2) + beside) = low;
    }
}

// Exponents of `count` cells from `first` on at a line of pixels, all queries of a cell side by side; zeros for queries
// that there are none of.
template <class T>
__device__ void load_exponents(const Plan &plan, const Tiling &tiling, const T *masks, int line, int first, int count,
                               float *to) {
    constexpr int kCells = 8, kQueries = kWarp / kCells, kTogether = 2 * kMaskStep / kQueries;
    const Place y(plan.down, plan.first + line);
    const T *upper = masks + y.low * plan.across.cells + first, *lower = masks + y.high * plan.across.cells + first;
    const int queries = tiling.steps * kMaskStep;
    for (int base = 0; base < count; base += kCells) {
        const int c = base + lane_index() % kCells;
        for (int start = lane_index() / kCells; start < queries; start += kTogether * kQueries) {
            float value[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int q = start + i * kQueries;
                value[i] = 0;
                if (c < count && q < plan.queries) {
                    const int at = q * plan.cells() + c;
                    value[i] = kExponent * between(to_float(upper[at]), to_float(lower[at]), y.weight);
                }
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int q = start + i * kQueries;
                if (c < count && q < queries) to[c * tiling.stride + q] = value[i];
            }
        }
    }
}

// Sums of 32 pixels for 8 N classes: those of a lane's pixels 8 i + lane / 4, in [i / 2][tile of classes][i % 2 * 2 + j]
// the class 2 (lane % 4) + j of the tile.
template <int N>
__device__ void add_products(const Tiling &tiling, const unsigned char *shares, const float *exponents,
                             const int (&left)[kMaskRows], const int (&right)[kMaskRows],
                             const float (&weight)[kMaskRows], float (&sum)[2][N][4]) {
    const int lane = lane_index();
    const unsigned char *matrix = shares + share_at(0, 8 * N, lane % 8, lane / 8);
    const float *own = exponents + lane % 4 * 4;
    for (int step = 0; step < tiling.steps; ++step) {
        unsigned high[2][4], low[2][4];
#pragma unroll
        for (int i = 0; i < kMaskRows; ++i) {
            const float4 a = *reinterpret_cast<const float4 *>(own + left[i]);
            const float4 b = *reinterpret_cast<const float4 *>(own + right[i]);
            const float w = weight[i];
            cut(sigmoid_of(between(a.x, b.x, w)), sigmoid_of(between(a.y, b.y, w)), high[i / 2][i % 2],
                low[i / 2][i % 2]);
            cut(sigmoid_of(between(a.z, b.z, w)), sigmoid_of(between(a.w, b.w, w)), high[i / 2][i % 2 + 2],
                low[i / 2][i % 2 + 2]);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            unsigned b[4];
            load_matrices(b, matrix + n * 8 * kShareBytes);
#pragma unroll
            for (int m = 0; m < 2; ++m) multiply(sum[m][n], high[m], b[0], b[1], __nv_bfloat16{});
#pragma unroll
            for (int m = 0; m < 2; ++m) multiply(sum[m][n], low[m], b[0], b[1], __nv_bfloat16{});
#pragma unroll
            for (int m = 0; m < 2; ++m) multiply(sum[m][n], high[m], b[2], b[3], __nv_bfloat16{});
        }
        own += kMaskStep;
        matrix += 8 * N * kShareBytes;
    }
}

// The best of 8 N classes from `first` on at the pixel 8 (lane % 4) + lane / 4.
template <int N>
__device__ Best best_of(const float (&sum)[2][N][4], int first, int classes) {
    const int quarter = lane_index() % 4;
    Best own = {-INFINITY, INT32_MAX};
#pragma unroll
    for (int i = 0; i < kMaskRows; ++i) {
        Best best = {-INFINITY, INT32_MAX};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int k = first + n * 8 + quarter * 2 + j;
                const float score = sum[i / 2][n][i % 2 * 2 + j];
                if (k < classes && score > best.score) best = {score, k};
            }
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2)
            best.take(__shfl_xor_sync(kAllLanes, best.score, offset), __shfl_xor_sync(kAllLanes, best.label, offset));
        if (quarter == i) own = best;
    }
    return own;
}

template <int N, class T>
__global__ void __launch_bounds__(kMaskWarps *kWarp)
    tensor_mask_kernel(Plan plan, Tiling tiling, const T *masks, const float *classes, void *labels, bool wide) {
    extern __shared__ __align__(16) unsigned char shares[];
    const int image = blockIdx.y, lane = lane_index();
    float *exponents = reinterpret_cast<float *>(shares + tiling.steps * 8 * N * kShareBytes) +
                       warp_index() * tiling.cells * tiling.stride;
    const T *from = plan.masks_of(masks, image);
    const float *probabilities = classes + int64_t{image} * plan.queries * plan.classes;
    Best best = {-INFINITY, INT32_MAX};
    for (int group = 0; group < tiling.groups; ++group) {
        if (group > 0) __syncthreads();
        cut_shares<8 * N>(plan, tiling.steps, probabilities, group * 8 * N, shares);
        __syncthreads();
        for (int tile = 0; tile < tiling.tiles; ++tile) {
            // Lines first: what they lie between is the same for several.
            const int index = (blockIdx.x * tiling.tiles + tile) * kMaskWarps + warp_index();
            const int line = index % plan.lines, start = index / plan.lines * kMaskPixels;
            if (start >= plan.across.pixels) break;
            const int last = plan.across.pixels - 1;
            const int first_cell = Place(plan.across, start).low;
            const int last_cell = Place(plan.across, min(start + kMaskPixels - 1, last)).high;
            __syncwarp();
            load_exponents(plan, tiling, from, line, first_cell, min(last_cell - first_cell + 1, tiling.cells),
                           exponents);
            __syncwarp();
            int left[kMaskRows], right[kMaskRows];
            float weight[kMaskRows], sum[2][N][4] = {};
#pragma unroll
            for (int i = 0; i < kMaskRows; ++i) {
                const Place x(plan.across, min(start + 8 * i + lane / 4, last));
                // Beyond 2^23 pixels places round to others than `tiling` counted.
                left[i] = min(x.low - first_cell, tiling.cells - 1) * tiling.stride;
                right[i] = min(x.high - first_cell, tiling.cells - 1) * tiling.stride;
                weight[i] = x.weight;
            }
            add_products<N>(tiling, shares, exponents, left, right, weight, sum);
            const Best found = best_of<N>(sum, group * 8 * N, plan.classes);
            if (group == 0) best = {-INFINITY, INT32_MAX};
            best.take(found.score, found.label);
            const int column = start + 8 * (lane % 4) + lane / 4;
            if (group < tiling.groups - 1 || column > last) continue;
            const int label = best.label < plan.classes ? best.label : 0;  // where no sum is a number, any will do
            const int64_t to = plan.label_at(image, line, column);
            if (wide)
                static_cast<int32_t *>(labels)[to] = label;
            else
                static_cast<uint8_t *>(labels)[to] = static_cast<uint8_t>(label);
        }
    }
}

// Tiles of eight classes that kernels have sums for: 24, 88 and 152 classes at once.
constexpr int kFewClasses = 3, kSomeClasses = 11, kManyClasses = 19;

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

    template <int N, class T>
    int tensor(int shared_bytes) const {
        const Tiling tiling(p, 8 * N);
        const auto kernel = tensor_mask_kernel<N, T>;
        const dim3 grid(static_cast<unsigned>(tiling.blocks(p.lines)), static_cast<unsigned>(p.batch));
        // Of every launch the same: as much as there is.
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return status_of(error);
        return launch<false>(kernel, {grid, kMaskWarps * kWarp, static_cast<int>(tiling.bytes(8 * N))}, stream, Plan(p),
                             tiling, static_cast<const T *>(masks), classes, labels, p.label_type == ALGM_LABEL_INT32);
    }

    template <class T>
    int with_type() const {
        bool has = false;
        int shared_bytes = 0;
        if (const int status = has_tensor_cores(tensor_mask_kernel<kFewClasses, T>, true, &has)) return status;
        if (const int status = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes)) return status;
#ifdef ALGM_SHARED_BYTES  // the tests try what a smaller card would do
        shared_bytes = ALGM_SHARED_BYTES - 1024;  // which a block has without asking
#endif
        switch (has ? tiles_of_classes(shared_bytes) : 0) {
            case kFewClasses: return tensor<kFewClasses, T>(shared_bytes);
            case kSomeClasses: return tensor<kSomeClasses, T>(shared_bytes);
            case kManyClasses: return tensor<kManyClasses, T>(shared_bytes);
        }
        return p.label_type == ALGM_LABEL_UINT8 ? plain<T, uint8_t>() : plain<T, int32_t>();
    }

    // How many tiles of classes a kernel shall have sums for; 0 where no kernel fits. Every group of classes costs the
    // sigmoids of all pixels once more, as much as products with about eight tiles.
    int tiles_of_classes(int shared_bytes) const {
        constexpr int kSigmoids = 8;
        int chosen = 0;
        int64_t least = INT64_MAX;
        for (const int tiles : {kFewClasses, kSomeClasses, kManyClasses}) {
            const Tiling tiling(p, 8 * tiles);
            const int64_t cost = int64_t{tiling.groups} * (tiles + kSigmoids);
            if (tiling.bytes(8 * tiles) <= shared_bytes && cost < least) {
                chosen = tiles;
                least = cost;
            }
        }
        return chosen;
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

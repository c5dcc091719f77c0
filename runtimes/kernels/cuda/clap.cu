#include "apply.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

// Grid arithmetic in 32 bits.
struct Grid {
    int rows, width, prefix, grid_w, window_h, window_w, down, across, windows, members, patches;

    explicit Grid(const algm_clap_params &p)
        : rows(static_cast<int>(p.rows)),
          width(static_cast<int>(p.width)),
          prefix(static_cast<int>(p.prefix)),
          grid_w(static_cast<int>(p.grid_w)),
          window_h(static_cast<int>(p.window_h)),
          window_w(static_cast<int>(p.window_w)),
          down(static_cast<int>(p.grid_h / p.window_h)),
          across(static_cast<int>(p.grid_w / p.window_w)),
          windows(static_cast<int>(window_count(p))),
          members(static_cast<int>(p.window_h * p.window_w)),
          patches(static_cast<int>(p.grid_h * p.grid_w)) {}

    // Row of a window's i-th member.
    __device__ int member(int window, int i) const {
        const int origin = window / across * window_h * grid_w + window % across * window_w;
        return prefix + origin + i / window_w * grid_w + i % window_w;
    }

    // Window of a patch, -1 on the border that no window covers.
    __device__ int window_of(int patch) const {
        const int y = patch / grid_w / window_h, x = patch % grid_w / window_w;
        return y < down && x < across ? y * across + x : -1;
    }
};

constexpr int kTile = 4;         // members whose products are formed together
constexpr int kWindowWarps = 4;  // windows of a block
constexpr int64_t kMaxMembers = 48 * 1024 / (kWindowWarps * sizeof(float));

// Products of kTile members with kTile others, summed over the lanes of a warp.
template <class T, int V>
__device__ void tile_products(const Grid &grid, const T *tokens, int window, int first_i, int first_j,
                              float (&products)[kTile][kTile]) {
    const T *left[kTile], *right[kTile];
#pragma unroll
    for (int t = 0; t < kTile; ++t) {  // past the last member: any row, its products are not used
        left[t] = tokens + int64_t{grid.member(window, min(first_i + t, grid.members - 1))} * grid.width;
        right[t] = tokens + int64_t{grid.member(window, min(first_j + t, grid.members - 1))} * grid.width;
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i)
#pragma unroll
        for (int j = 0; j < kTile; ++j) products[i][j] = 0;
    const bool diagonal = first_i == first_j;
    for (int pack = lane_index(); pack < grid.width / V; pack += kWarp) {
        Pack<T, V> a[kTile], b[kTile];
#pragma unroll
        for (int t = 0; t < kTile; ++t) a[t] = load_pack<T, V>(left[t], pack);
#pragma unroll
        for (int t = 0; t < kTile; ++t) b[t] = diagonal ? a[t] : load_pack<T, V>(right[t], pack);
#pragma unroll
        for (int v = 0; v < V; ++v)
#pragma unroll
            for (int i = 0; i < kTile; ++i)
#pragma unroll
                for (int j = 0; j < kTile; ++j)
                    if (!diagonal || j <= i)
                        products[i][j] = fmaf(to_float(a[i].value[v]), to_float(b[j].value[v]), products[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i)
#pragma unroll
        for (int j = 0; j < kTile; ++j)
            if (!diagonal || j <= i) products[i][j] = warp_sum(products[i][j]);
}

// Mean cosine of every window: one warp a window, members in tiles; the inverse norms come from the diagonal tiles.
template <class T, int V>
__global__ void similarity_kernel(Grid grid, int64_t total, const T *tokens, float *similarity) {
    extern __shared__ float norms[];
    float *scale = norms + warp_index() * grid.members;
    const int64_t index = int64_t{blockIdx.x} * kWindowWarps + warp_index();
    if (index >= total) return;
    const int window = static_cast<int>(index % grid.windows);
    tokens += index / grid.windows * grid.rows * grid.width;
    float products[kTile][kTile], sum = 0;
    for (int first = 0; first < grid.members; first += kTile) {
        tile_products<T, V>(grid, tokens, window, first, first, products);
        float own[kTile];
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
            own[t] = 1.0f / fmaxf(sqrtf(products[t][t]), kNormEps);
            if (first + t < grid.members && lane_index() == 0) scale[first + t] = own[t];
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i)
#pragma unroll
            for (int j = 0; j < i; ++j)
                if (first + i < grid.members) sum += products[i][j] * own[i] * own[j];
    }
    __syncwarp();
    for (int first_i = kTile; first_i < grid.members; first_i += kTile)
        for (int first_j = 0; first_j < first_i; first_j += kTile) {
            tile_products<T, V>(grid, tokens, window, first_i, first_j, products);
#pragma unroll
            for (int i = 0; i < kTile; ++i)
#pragma unroll
                for (int j = 0; j < kTile; ++j)
                    if (first_i + i < grid.members)
                        sum += products[i][j] * scale[first_i + i] * scale[first_j + j];
        }
    const float pairs = static_cast<float>(int64_t{grid.members} * (grid.members - 1));
    if (lane_index() == 0) similarity[index] = 2 * sum / pairs;
}

struct Decision {
    int batch;
    bool strict, batch_min, raster;
    const float *similarity, *threshold;
    int32_t *place, *source, *rows_int32;
    int64_t *map, *length, *plan_length, *rows, *plan_rows;

    __device__ bool qualifies(float value, float tau) const { return strict ? value > tau : value >= tau; }
};

// Fewest qualifying windows of any image: one warp an image.
__device__ int fewest_merges(const Decision &d, int windows, float tau) {
    int fewest = windows;
    for (int b = warp_index(); b < d.batch; b += blockDim.x / kWarp) {
        int count = 0;
        for (int w = lane_index(); w < windows; w += kWarp)
            count += d.qualifies(d.similarity[int64_t{b} * windows + w], tau);
        fewest = min(fewest, warp_sum(count));
    }
    return block_combine(fewest, [](int a, int b) { return min(a, b); });
}

// Fills `place`: for every window its place among the merged ones, or -1.
__device__ void place_windows(const Decision &d, const float *values, int windows, int merges, float tau,
                              int32_t *place) {
    const bool ranked = d.batch_min || !d.raster;
    int placed = 0;
    for (int start = 0; start < windows; start += blockDim.x) {
        const int w = start + threadIdx.x;
        const int rank = ranked ? block_rank(values, windows, w) : 0;
        const bool merged = w < windows && d.qualifies(values[w], tau) && (!ranked || rank < merges);
        const int before = block_flags_before(merged, placed);
        if (w < windows) place[w] = !merged ? -1 : d.raster ? before : rank;
    }
    __syncthreads();
}

// One block an image: who merges, in what place, and where every patch goes.
__global__ void __launch_bounds__(1024) decide_kernel(Grid grid, Decision d) {
    const int b = blockIdx.x;
    const float tau = *d.threshold;
    const float *values = d.similarity + int64_t{b} * grid.windows;
    int fewest = 0;
    if (d.batch_min || b == 0) {
        fewest = fewest_merges(d, grid.windows, tau);
        if (b == 0 && threadIdx.x == 0) {  // the image with the fewest merges is the longest
            *d.rows = *d.plan_rows = grid.rows - int64_t{fewest} * (grid.members - 1);
            if (d.rows_int32 != nullptr) *d.rows_int32 = static_cast<int32_t>(*d.rows);
        }
    }
    int merges = fewest;
    if (!d.batch_min) {
        merges = 0;
        for (int start = 0; start < grid.windows; start += blockDim.x) {
            const int w = start + threadIdx.x;
            merges += block_count(w < grid.windows && d.qualifies(values[w], tau));
        }
    }
    int32_t *place = d.place + int64_t{b} * grid.windows;
    place_windows(d, values, grid.windows, merges, tau, place);

    int64_t *map = d.map + int64_t{b} * grid.patches;
    int32_t *source = d.source + int64_t{b} * grid.rows;
    for (int row = threadIdx.x; row < grid.prefix; row += blockDim.x) source[row] = row;
    int next = grid.prefix + merges;
    for (int start = 0; start < grid.patches; start += blockDim.x) {
        const int patch = start + threadIdx.x;
        const int window = patch < grid.patches ? grid.window_of(patch) : -1;
        const bool merged = window >= 0 && place[window] >= 0;
        const int after = block_flags_before(patch < grid.patches && !merged, next);
        if (patch >= grid.patches) continue;
        const int row = merged ? grid.prefix + place[window] : after;
        map[patch] = row;
        source[row] = merged ? -1 - window : grid.prefix + patch;
    }
    if (threadIdx.x == 0) d.length[b] = d.plan_length[b] = next;
}

struct WindowMembers {
    Grid grid;

    template <class Add>
    __device__ void visit(int, int window, Add add) const {
#pragma unroll 4
        for (int i = 0; i < grid.members; ++i) add(grid.member(window, i));
    }
};

}  // namespace

const char *algm_cuda_status_text(int status) {
    return status > ALGM_DEVICE_ERROR ? cudaGetErrorString(static_cast<cudaError_t>(status - ALGM_DEVICE_ERROR))
                                      : status_sentence(status);
}

size_t algm_cuda_clap_workspace(const algm_clap_params *params) {
    if (check_batch(params) != ALGM_OK) return 0;
    Carver carver(nullptr);
    ClapPlan(*params, carver);
    return carver.used();
}

int algm_cuda_clap_similarity(const algm_clap_params *params, const void *tokens, float *similarity, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, similarity)) return ALGM_INVALID_ARGUMENT;
    const Grid grid(*params);
    if (grid.members > kMaxMembers) return ALGM_UNSUPPORTED;
    const int64_t total = params->batch * grid.windows;
    if (total == 0) return ALGM_OK;
    const unsigned blocks = static_cast<unsigned>(ceil_div(total, kWindowWarps));
    const size_t shared = kWindowWarps * grid.members * sizeof(float);
    return with_dtype(params->dtype, params->width, is_aligned(tokens), [&](auto type, auto pack) {
        using T = decltype(type);
        similarity_kernel<T, decltype(pack)::value><<<blocks, kWindowWarps * kWarp, shared, stream_of(stream)>>>(
            grid, total, static_cast<const T *>(tokens), similarity);
        return launched();
    });
}

int algm_cuda_clap_decide_given(const algm_clap_params *params, const float *similarity, const float *threshold,
                                int64_t *map, int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace,
                                void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(similarity, threshold, map, length, rows, workspace)) return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    const ClapPlan plan(*params, carver);
    const Grid grid(*params);
    const Decision decision = {static_cast<int>(params->batch),
                               params->semantics == ALGM_SEMANTICS_PAPER,
                               params->batch_mode == ALGM_BATCH_MIN,
                               params->order == ALGM_ORDER_RASTER,
                               similarity,
                               threshold,
                               plan.place,
                               plan.source,
                               rows_int32,
                               map,
                               length,
                               plan.length,
                               rows,
                               plan.rows};
    decide_kernel<<<static_cast<unsigned>(params->batch), block_threads(grid.patches), 0, stream_of(stream)>>>(grid,
                                                                                                               decision);
    return launched();
}

int algm_cuda_clap_decide(const algm_clap_params *params, const void *tokens, const float *threshold, int64_t *map,
                          int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (workspace == nullptr) return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    float *similarity = ClapPlan(*params, carver).similarity;
    if (const int status = algm_cuda_clap_similarity(params, tokens, similarity, stream)) return status;
    return algm_cuda_clap_decide_given(params, similarity, threshold, map, length, rows, rows_int32, workspace, stream);
}

int algm_cuda_clap_apply(const algm_clap_params *params, const void *tokens, const float *size, const void *workspace,
                         int64_t out_rows, void *out_tokens, float *out_size, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, size, workspace, out_tokens, out_size)) return ALGM_INVALID_ARGUMENT;
    Carver carver(const_cast<void *>(workspace));
    const ClapPlan plan(*params, carver);
    const Grid grid(*params);
    const ApplyShape shape = {grid.rows, grid.width, out_rows, plan.rows, plan.length, plan.source, true};
    return launch_apply(params->dtype, params->batch, shape, WindowMembers{grid}, tokens, size, out_tokens, out_size,
                        stream);
}

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

// Products of kTile members with kTile others, summed over the lanes of a warp; on the diagonal only those with j <= i.
template <bool DIAGONAL, class T, int V>
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
    for (int pack = lane_index(); pack < grid.width / V; pack += kWarp) {
        Pack<T, V> a[kTile], b[kTile];
#pragma unroll
        for (int t = 0; t < kTile; ++t) a[t] = load_pack<T, V>(left[t], pack);
#pragma unroll
        for (int t = 0; t < kTile; ++t) b[t] = DIAGONAL ? a[t] : load_pack<T, V>(right[t], pack);
#pragma unroll
        for (int v = 0; v < V; ++v)
#pragma unroll
            for (int i = 0; i < kTile; ++i)
#pragma unroll
                for (int j = 0; j < kTile; ++j)
                    if (!DIAGONAL || j <= i)
                        products[i][j] = fmaf(to_float(a[i].value[v]), to_float(b[j].value[v]), products[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i)
#pragma unroll
        for (int j = 0; j < kTile; ++j)
            if (!DIAGONAL || j <= i) products[i][j] = warp_sum(products[i][j]);
}

// Mean cosine of every window: one warp a window, members in tiles; the inverse norms come from the diagonal tiles.
// ONE_TILE: windows of at most kTile patches, the usual case, which needs far fewer registers.
template <class T, int V, bool ONE_TILE>
__global__ void __launch_bounds__(kWindowWarps *kWarp)
    similarity_kernel(Grid grid, int64_t total, const T *tokens, float *similarity, RowCount count) {
    extern __shared__ float norms[];
    float *scale = norms + warp_index() * grid.members;
    const int64_t index = int64_t{blockIdx.x} * kWindowWarps + warp_index();
    if (index == 0 && lane_index() == 0) count.clear();
    if (index >= total) return;
    const int window = static_cast<int>(index % grid.windows);
    tokens += index / grid.windows * grid.rows * grid.width;
    float products[kTile][kTile], sum = 0;
    for (int first = 0; first < (ONE_TILE ? 1 : grid.members); first += kTile) {
        tile_products<true, T, V>(grid, tokens, window, first, first, products);
        float own[kTile];
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
            own[t] = 1.0f / fmaxf(sqrtf(products[t][t]), kNormEps);
            if (!ONE_TILE && first + t < grid.members && lane_index() == 0) scale[first + t] = own[t];
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i)
#pragma unroll
            for (int j = 0; j < i; ++j)
                if (first + i < grid.members) sum += products[i][j] * own[i] * own[j];
    }
    __syncwarp();
    for (int first_i = kTile; !ONE_TILE && first_i < grid.members; first_i += kTile)
        for (int first_j = 0; first_j < first_i; first_j += kTile) {
            tile_products<false, T, V>(grid, tokens, window, first_i, first_j, products);
#pragma unroll
            for (int i = 0; i < kTile; ++i)
#pragma unroll
                for (int j = 0; j < kTile; ++j)
                    if (first_i + i < grid.members) sum += products[i][j] * scale[first_i + i] * scale[first_j + j];
        }
    const float pairs = static_cast<float>(int64_t{grid.members} * (grid.members - 1));
    if (lane_index() == 0) similarity[index] = 2 * sum / pairs;
}

struct Decision {
    int batch;
    bool strict, batch_min, raster;
    const float *similarity, *threshold;
    int32_t *place, *source;
    int64_t *map, *length, *plan_length;
    RowCount count;

    __device__ bool qualifies(float value, float tau) const { return strict ? value > tau : value >= tau; }
};

// How many windows of one image qualify, by one warp.
__device__ int qualifying(const Decision &d, const float *values, int windows, float tau) {
    int count = 0;
#pragma unroll 4
    for (int w = lane_index(); w < windows; w += kWarp) count += d.qualifies(values[w], tau);
    return warp_sum(count);
}

// Fewest qualifying windows of any image: one warp an image.
__device__ int fewest_merges(const Decision &d, int windows, float tau) {
    int fewest = windows;
    for (int b = warp_index(); b < d.batch; b += blockDim.x / kWarp)
        fewest = min(fewest, qualifying(d, d.similarity + int64_t{b} * windows, windows, tau));
    return block_min(fewest);
}

// Fills `place`: for every window its place among the merged ones, or -1. Merged are the `merges` best.
__device__ void place_windows(const Decision &d, const float *values, int windows, int merges, float tau,
                              int32_t *place) {
    int placed = 0;
    for (int start = 0; start < windows; start += blockDim.x / kRankers) {
        const int w = start + threadIdx.x / kRankers;
        const int rank = block_rank(values, windows, w);
        const bool writes = w < windows && threadIdx.x % kRankers == 0;
        const bool merged = writes && d.qualifies(values[w], tau) && rank < merges;
        const int before = block_flags_before(merged, placed);
        if (writes) place[w] = !merged ? -1 : d.raster ? before : rank;
    }
    __syncthreads();
}

// One block an image: who merges, in what place, and where every patch goes.
__global__ void __launch_bounds__(1024) decide_kernel(Grid grid, Decision d) {
    const int b = blockIdx.x;
    const float tau = *d.threshold;
    const float *values = d.similarity + int64_t{b} * grid.windows;
    // Every warp counts for itself: cheaper than to tell the others.
    const int merges = d.batch_min ? fewest_merges(d, grid.windows, tau) : qualifying(d, values, grid.windows, tau);
    int32_t *place = d.place + int64_t{b} * grid.windows;
    place_windows(d, values, grid.windows, merges, tau, place);

    int64_t *map = d.map + int64_t{b} * grid.patches;
    int32_t *source = d.source + int64_t{b} * grid.rows;
    for (int row = threadIdx.x; row < grid.prefix; row += blockDim.x) source[row] = row;
    int next = grid.prefix + merges;
    for (int start = 0; start < grid.patches; start += blockDim.x) {
        const int patch = start + threadIdx.x;
        const int window = patch < grid.patches ? grid.window_of(patch) : -1;
        const int in_place = window >= 0 ? place[window] : -1;
        const int after = block_flags_before(patch < grid.patches && in_place < 0, next);
        if (patch >= grid.patches) continue;
        const int row = in_place >= 0 ? grid.prefix + in_place : after;
        map[patch] = row;
        source[row] = in_place >= 0 ? -1 - window : grid.prefix + patch;
    }
    if (threadIdx.x == 0) {
        d.length[b] = d.plan_length[b] = next;
        d.count.raise(next);
    }
}

struct WindowMembers {
    static constexpr bool kLongRowsLast = false;
    static constexpr int kTogether = 4, kPacks = 1, kBlocks = 5;  // mostly windows of four
    Grid grid;

    template <class Add>
    __device__ void visit(int, int window, int *list, Add add) const {
        for (int start = 0; start < grid.members; start += kMemberList) {
            const int count = min(kMemberList, grid.members - start);
            for (int i = lane_index(); i < count; i += kWarp) list[i] = grid.member(window, start + i);
            __syncwarp();
            add(count);
            __syncwarp();
        }
    }
};

int launch_similarity(const algm_clap_params &p, const void *tokens, float *similarity, const RowCount &count,
                      void *stream) {
    const Grid grid(p);
    if (grid.members > kMaxMembers) return ALGM_UNSUPPORTED;
    const int64_t total = p.batch * grid.windows;
    const unsigned blocks = static_cast<unsigned>(total > 0 ? ceil_div(total, kWindowWarps) : 1);
    const size_t shared = kWindowWarps * grid.members * sizeof(float);
    return with_dtype(p.dtype, p.width, is_aligned(tokens), [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int V = decltype(pack)::value;
        const auto kernel = grid.members <= kTile ? similarity_kernel<T, V, true> : similarity_kernel<T, V, false>;
        kernel<<<blocks, kWindowWarps * kWarp, shared, stream_of(stream)>>>(grid, total, static_cast<const T *>(tokens),
                                                                            similarity, count);
        return launched();
    });
}

int launch_decision(const algm_clap_params &p, const ClapPlan &plan, const float *similarity, const float *threshold,
                    int64_t *map, int64_t *length, const RowCount &count, void *stream) {
    const Grid grid(p);
    const Decision decision = {static_cast<int>(p.batch),
                               p.semantics == ALGM_SEMANTICS_PAPER,
                               p.batch_mode == ALGM_BATCH_MIN,
                               p.order == ALGM_ORDER_RASTER,
                               similarity,
                               threshold,
                               plan.place,
                               plan.source,
                               map,
                               length,
                               plan.length,
                               count};
    const unsigned threads = block_threads(grid.patches);
    decide_kernel<<<static_cast<unsigned>(p.batch), threads, 0, stream_of(stream)>>>(grid, decision);
    return launched();
}

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
    if (tokens == nullptr || is_missing(similarity, window_count(*params))) return ALGM_INVALID_ARGUMENT;
    return launch_similarity(*params, tokens, similarity, {}, stream);
}

int algm_cuda_clap_decide_given(const algm_clap_params *params, const float *similarity, const float *threshold,
                                int64_t *map, int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace,
                                void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(threshold, map, length, rows, workspace) || is_missing(similarity, window_count(*params)))
        return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    const ClapPlan plan(*params, carver);
    const RowCount count = {rows, plan.rows, rows_int32};
    if (const int status = count.clear_on(stream_of(stream))) return status;
    return launch_decision(*params, plan, similarity, threshold, map, length, count, stream);
}

int algm_cuda_clap_decide(const algm_clap_params *params, const void *tokens, const float *threshold, int64_t *map,
                          int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, threshold, map, length, rows, workspace)) return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    const ClapPlan plan(*params, carver);
    const RowCount count = {rows, plan.rows, rows_int32};
    if (const int status = launch_similarity(*params, tokens, plan.similarity, count, stream)) return status;
    return launch_decision(*params, plan, plan.similarity, threshold, map, length, count, stream);
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

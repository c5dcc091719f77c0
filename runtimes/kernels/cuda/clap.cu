#include "apply.cuh"
#include "tensor.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

// A row of `new_row` is -1 - row where windows merge.
struct Plan : MergePlan {
    float *similarity;  // (B,W)
    float *qualified;   // (B,W) similarities of the windows that qualify, one after another
    int32_t *listed;    // (B,W) which windows these are
    int32_t *place;     // (B,W) place of a merged window among the merged ones, -1 if it stays

    Plan(const algm_clap_params &p, Carver &carver)
        : MergePlan(p, carver),
          similarity(carver.take<float>(p.batch * window_count(p))),
          qualified(carver.take<float>(p.batch * window_count(p))),
          listed(carver.take<int32_t>(p.batch * window_count(p))),
          place(carver.take<int32_t>(p.batch * window_count(p))) {}
};

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

    // The i-th row that no window covers: prefix, border at the right, border below, then rows past the last one.
    __device__ int single(int i) const {
        if (i < prefix) return i;
        i -= prefix;
        const int covered_w = across * window_w, covered_h = down * window_h, beside = grid_w - covered_w;
        if (i < covered_h * beside) return prefix + i / beside * grid_w + covered_w + i % beside;
        return prefix + covered_h * grid_w + i - covered_h * beside;
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
    let_next_start();
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
            own[t] = inverse_norm(products[t][t]);
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

constexpr int kSums = 4;         // independent sums of a product
constexpr int kPairWarps = 4;    // warps of a block
constexpr int kPairsPerSm = 16;  // with fewer pairs of windows a multiprocessor, the warps of a block share one

// Mean cosine of windows of up to kTile patches on tensor cores: the eight rows of two windows times themselves. Lane
// 4 r + q loads every fourth 16-byte chunk of row r, which the product takes as columns whatever their place in the
// row: its order does not matter as long as both factors have the same. SHARED: the warps of a block add up one of the
// kSums sums each. Either way gives the same bits.
template <class T, bool SHARED>
__global__ void __launch_bounds__(kPairWarps *kWarp, 8)
    pair_similarity_kernel(Grid grid, int64_t total, const T *tokens, float *similarity, RowCount count) {
    constexpr int kOwnSums = SHARED ? 1 : kSums, kAhead = 8 / kOwnSums;
    let_next_start();
    if (blockIdx.x + threadIdx.x == 0) count.clear();
    const int row = lane_index() / 4, quarter = lane_index() % 4;
    const int64_t pair = SHARED ? blockIdx.x : int64_t{blockIdx.x} * kPairWarps + warp_index();
    const int64_t index = 2 * pair + row / kTile;
    const bool exists = index < total;
    const int64_t image = exists ? index / grid.windows : 0;
    const int window = exists ? static_cast<int>(index % grid.windows) : 0;
    // Past the last member: the last once more, not used.
    const int64_t from_row = image * grid.rows + grid.member(window, min(row % kTile, grid.members - 1));
    const uint4 *from = reinterpret_cast<const uint4 *>(tokens + from_row * grid.width) + quarter;
    const int last = grid.width / 8 - 1 - quarter;

    float sums[kOwnSums][4] = {};
    for (int start = SHARED ? warp_index() : 0; 4 * start < grid.width / 8; start += kSums * kAhead) {
        uint4 loaded[kAhead][kOwnSums];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int s = 0; s < kOwnSums; ++s) {
                loaded[i][s] = from[min(4 * (start + i * kSums + s), last)];
                __syncwarp();  // or the compiler waits for each load before the next
            }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int s = 0; s < kOwnSums; ++s) {
                const bool inside = 4 * (start + i * kSums + s) <= last;
                const uint4 x = inside ? loaded[i][s] : make_uint4(0, 0, 0, 0);
                const unsigned first[4] = {x.x, 0, x.y, 0}, second[4] = {x.z, 0, x.w, 0};
                multiply(sums[s], first, x.x, x.y, T{});
                multiply(sums[s], second, x.z, x.w, T{});
            }
    }
    // The products of row `row` with rows 2 quarter and 2 quarter + 1.
    float left = 0, right = 0;
    if (SHARED) {
        __shared__ float2 shared[kSums][kWarp];
        shared[warp_index()][lane_index()] = make_float2(sums[0][0], sums[0][1]);
        __syncthreads();
        if (warp_index() > 0) return;
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
            left += shared[s][lane_index()].x;
            right += shared[s][lane_index()].y;
        }
    } else {
#pragma unroll
        for (int s = 0; s < kOwnSums; ++s) {
            left += sums[s][0];
            right += sums[s][1];
        }
    }
    // The diagonal lies in the lanes with quarter == row / 2.
    const float inverse = inverse_norm(row % 2 == 0 ? left : right);
    const float own = __shfl_sync(kAllLanes, inverse, row * 4 + row / 2);
    const float scale_left = __shfl_sync(kAllLanes, inverse, quarter * 9);
    const float scale_right = __shfl_sync(kAllLanes, inverse, quarter * 9 + 4);
    const int member = row % kTile, other = 2 * quarter % kTile;
    const bool counts = row / kTile == 2 * quarter / kTile && member < grid.members;
    float sum = 0;
    if (counts && other < member) sum += left * own * scale_left;
    if (counts && other + 1 < member) sum += right * own * scale_right;
    for (int offset = 1; offset < kWarp / 2; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    const float pairs = static_cast<float>(grid.members * (grid.members - 1));
    if (exists && lane_index() % 16 == 0) similarity[index] = 2 * sum / pairs;
}

struct Decision {
    Plan plan;
    int batch, budget;
    bool strict, batch_min, raster, counted;
    const float *similarity, *threshold;
    int64_t *map, *length;
    RowCount count;

    __device__ bool qualifies(float value, float tau) const {
        return counted || (strict ? value > tau : value >= tau);
    }
};

// Fewest qualifying windows of any image: one warp an image.
__device__ int fewest_merges(const Decision &d, int windows, float tau) {
    int fewest = windows;
    for (int b = warp_index(); b < d.batch; b += blockDim.x / kWarp) {
        const float *values = d.similarity + int64_t{b} * windows;
        int count = 0;
#pragma unroll 8
        for (int w = lane_index(); w < windows; w += kWarp) count += d.qualifies(values[w], tau);
        fewest = min(fewest, warp_sum(count));
    }
    return block_min(fewest);
}

// What the decision on an image remembers of its windows, in shared memory if it fits.
struct Windows {
    float *qualified;  // similarities of those that qualify, by ascending window
    int32_t *listed;   // and which these are
    int32_t *place;    // of every window among the merged ones, -1 if it stays
};

// Lists the windows that qualify; their places are those in the list. Returns how many.
__device__ int list_qualified(const Decision &d, const float *values, int windows, float tau, const Windows &w) {
    int count = 0;
    for (int start = 0; start < windows; start += blockDim.x) {
        const int window = start + threadIdx.x;
        const float value = window < windows ? values[window] : 0;
        const bool qualifies = window < windows && d.qualifies(value, tau);
        const int before = block_flags_before(qualifies, count);
        if (qualifies) {
            w.qualified[before] = isnan(value) ? -INFINITY : value;  // by budget they qualify, and come last
            w.listed[before] = window;
        }
        if (window < windows) w.place[window] = qualifies ? before : -1;
    }
    __syncthreads();
    return count;
}

// Replaces the places by the ranks of the `merges` best windows.
__device__ void rank_windows(const Windows &w, int count, int merges) {
    for (int start = 0; start < count; start += blockDim.x / kRankers) {
        const int i = start + threadIdx.x / kRankers, rank = rank_of(w.qualified, count, i);
        if (i < count && threadIdx.x % kRankers == 0) w.place[w.listed[i]] = rank < merges ? rank : -1;
    }
    __syncthreads();
}

// Replaces the ranks by the order of the windows.
__device__ void order_by_position(int windows, int32_t *place) {
    int placed = 0;
    for (int start = 0; start < windows; start += blockDim.x) {
        const int w = start + threadIdx.x;
        const bool merged = w < windows && place[w] >= 0;
        const int before = block_flags_before(merged, placed);
        if (merged) place[w] = before;
    }
    __syncthreads();
}

constexpr int kSharedWindows = 1024;  // windows of an image that fit into shared memory

// One block an image: who merges, in what place, and where every patch goes.
__global__ void __launch_bounds__(1024) decide_kernel(Grid grid, Decision d) {
    __shared__ float shared_qualified[kSharedWindows];
    __shared__ int32_t shared_listed[kSharedWindows], shared_place[kSharedWindows];
    const int b = blockIdx.x, windows = grid.windows;
    const bool fits = windows <= kSharedWindows;
    const int64_t offset = int64_t{b} * windows;
    const Windows w = {fits ? shared_qualified : d.plan.qualified + offset,
                       fits ? shared_listed : d.plan.listed + offset, fits ? shared_place : d.plan.place + offset};
    const float tau = d.counted ? 0 : *d.threshold;
    int window = grid.window_of(threadIdx.x);
    wait_for_previous();

    const int count = list_qualified(d, d.similarity + offset, windows, tau, w);
    let_next_start();  // not before: what it loads would delay the similarities
    const int merges = d.counted ? min(d.budget, windows) : d.batch_min ? fewest_merges(d, windows, tau) : count;
    const bool some = d.counted || d.batch_min;  // of those that qualify only the best merge
    if (!d.raster || some) rank_windows(w, count, merges);
    if (d.raster && some) order_by_position(windows, w.place);

    int64_t *map = d.map + int64_t{b} * grid.patches;
    int32_t *new_row = d.plan.new_row + int64_t{b} * grid.rows;
    for (int row = threadIdx.x; row < grid.prefix; row += blockDim.x) new_row[row] = row;
    int next = grid.prefix + merges;
    for (int start = 0; start < grid.patches; start += blockDim.x) {
        const int patch = start + threadIdx.x;
        const bool exists = patch < grid.patches;
        const int in_place = exists && window >= 0 ? w.place[window] : -1;
        const int after = block_flags_before(exists && in_place < 0, next);
        const int row = in_place >= 0 ? grid.prefix + in_place : after;
        if (exists) {
            map[patch] = row;
            new_row[grid.prefix + patch] = in_place >= 0 ? -1 - row : row;
        }
        window = grid.window_of(patch + blockDim.x);
    }
    if (threadIdx.x == 0) {
        d.length[b] = d.plan.length[b] = next;
        d.count.raise(next);
    }
}

// A warp carries a span of the rows of a window, or of kGroup rows outside all windows, to where the plan says.
// ONE_GROUP: windows of at most kGroup patches, the usual case, which are loaded early.
template <class T, int V, bool ONE_GROUP>
__global__ void __launch_bounds__(kApplyWarps *kWarp, 4)
    apply_kernel(ApplyShape shape, Grid grid, int items, int spans, const int32_t *new_row, const T *tokens,
                 const float *size, T *out_tokens, float *out_size) {
    const int unit = blockIdx.x * kApplyWarps + warp_index(), item = unit / spans;
    if (item >= items) return;
    // Last image first: decide read the images in order, so the last ones are still in the cache.
    const int image = gridDim.y - 1 - blockIdx.y;
    Rows<T, V> rows(shape, image, unit % spans, tokens, size);
    new_row += int64_t{image} * grid.rows;
    const bool is_window = item < grid.windows;
    const int count = is_window ? grid.members : kGroup;
    const auto row_at = [&](int i) {
        return is_window ? grid.member(item, i) : grid.single((item - grid.windows) * kGroup + i);
    };
    const auto lane_row_at = [&](int start) {  // lanes g, g + kGroup, ... look after member start + g
        const int member = start + lane_index() % kGroup;
        return member < count ? row_at(member) : kNoRow;
    };
    int lane_row = lane_row_at(0), lane_target = kNoRow;
    float lane_size = 0;
    Bits<T, V> early[kGroup][kSpanPacks];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
        const int row = __shfl_sync(kAllLanes, lane_row, g);
#pragma unroll
        for (int i = 0; i < kSpanPacks; ++i)
            if (ONE_GROUP && rows.has(row, i)) early[g][i] = rows.load(row, i);
    }
    wait_for_previous();
    rows.find_output(shape, image, out_tokens, out_size);
    const auto look_up = [&] {
        if (lane_row >= grid.rows) return;
        lane_target = new_row[lane_row];
        lane_size = rows.size[lane_row];
    };
    look_up();
    const int first_target = __shfl_sync(kAllLanes, lane_target, 0);
    const bool merges = is_window && first_target < 0 && rows.has_room();
    const bool copies = !merges && rows.has_room();
#pragma unroll
    for (int i = 0; i < kSpanPacks; ++i) {
        Mean<T, V> mean;
        for (int start = 0; start < (ONE_GROUP ? kGroup : count); start += kGroup) {
            if (!ONE_GROUP) {
                lane_row = lane_row_at(start);
                look_up();
            }
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                const int row = __shfl_sync(kAllLanes, lane_row, g), target = __shfl_sync(kAllLanes, lane_target, g);
                const float w = __shfl_sync(kAllLanes, lane_size, g);
                if (!rows.has(row, i)) continue;
                const Bits<T, V> values = ONE_GROUP ? early[g][i] : rows.load(row, i);
                if (merges)
                    mean.add(values, w);
                else if (copies)
                    rows.store(target, i, values);
            }
            if (i > 0) continue;
            if (copies && lane_row < grid.rows) rows.store_size(lane_target, lane_size, kGroup);
            rows.write_padding(lane_row);
        }
        if (merges) rows.store(-1 - first_target, i, mean.value());
        if (merges && i == 0) rows.store_size(-1 - first_target, mean.weight, 1);
    }
}

template <class T>
int launch_pairs(const Grid &grid, int64_t total, const void *tokens, float *similarity, const RowCount &count,
                 void *stream) {
    int multiprocessors = 0;
    if (const int status = device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors)) return status;
    const int64_t pairs = ceil_div(total, 2);
    const bool shared = pairs < int64_t{kPairsPerSm} * multiprocessors;
    const auto kernel = shared ? pair_similarity_kernel<T, true> : pair_similarity_kernel<T, false>;
    const unsigned blocks = static_cast<unsigned>(shared ? pairs : ceil_div(pairs, kPairWarps));
    return launch<false>(kernel, {dim3(blocks), kPairWarps * kWarp}, stream, grid, total,
                         static_cast<const T *>(tokens), similarity, count);
}

int launch_similarity(const algm_clap_params &p, const void *tokens, float *similarity, const RowCount &count,
                      void *stream) {
    const Grid grid(p);
    if (grid.members > kMaxMembers) return ALGM_UNSUPPORTED;
    const int64_t total = p.batch * grid.windows;
    if (total == 0) return count.rows == nullptr ? ALGM_OK : clear_on(stream, count);
    if (grid.members <= kTile && p.width % 8 == 0 && is_aligned(tokens) && p.dtype != ALGM_FLOAT32) {
        const bool is_bf16 = p.dtype == ALGM_BFLOAT16;
        bool has = false;
        if (const int status = has_tensor_cores(pair_similarity_kernel<__nv_bfloat16, true>, is_bf16, &has))
            return status;
        if (has && is_bf16) return launch_pairs<__nv_bfloat16>(grid, total, tokens, similarity, count, stream);
        if (has) return launch_pairs<__half>(grid, total, tokens, similarity, count, stream);
    }
    const unsigned blocks = static_cast<unsigned>(ceil_div(total, kWindowWarps));
    const int shared = kWindowWarps * grid.members * static_cast<int>(sizeof(float));
    return with_dtype(p.dtype, p.width, is_aligned(tokens), [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int V = decltype(pack)::value;
        const auto kernel = grid.members <= kTile ? similarity_kernel<T, V, true> : similarity_kernel<T, V, false>;
        return launch<false>(kernel, {dim3(blocks), kWindowWarps * kWarp, shared}, stream, grid, total,
                             static_cast<const T *>(tokens), similarity, count);
    });
}

int launch_decision(const algm_clap_params &p, const Plan &plan, const float *similarity, const float *threshold,
                    int64_t *map, int64_t *length, const RowCount &count, void *stream) {
    const Grid grid(p);
    const Decision decision = {plan,
                               static_cast<int>(p.batch),
                               static_cast<int>(p.budget < grid.windows ? p.budget : grid.windows),
                               p.semantics == ALGM_SEMANTICS_PAPER,
                               p.batch_mode == ALGM_BATCH_MIN,
                               p.order == ALGM_ORDER_RASTER,
                               counts_merges(p.rule),
                               similarity,
                               threshold,
                               map,
                               length,
                               count};
    const Blocks blocks = {dim3(static_cast<unsigned>(p.batch)), block_threads(grid.patches)};
    return launch<true>(decide_kernel, blocks, stream, grid, decision);
}

}  // namespace

const char *algm_cuda_status_text(int status) {
    return status > ALGM_DEVICE_ERROR ? cudaGetErrorString(static_cast<cudaError_t>(status - ALGM_DEVICE_ERROR))
                                      : status_sentence(status);
}

size_t algm_cuda_clap_workspace(const algm_clap_params *params) {
    return check_batch(params) == ALGM_OK ? plan_bytes<Plan>(*params) : 0;
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
    if (any_null(map, length, rows, workspace) || lacks_threshold(params->rule, threshold) ||
        is_missing(similarity, window_count(*params)))
        return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<Plan>(workspace, *params);
    const RowCount count = plan.count(rows, rows_int32);
    if (const int status = clear_on(stream, count)) return status;
    return launch_decision(*params, plan, similarity, threshold, map, length, count, stream);
}

int algm_cuda_clap_decide(const algm_clap_params *params, const void *tokens, const float *threshold, int64_t *map,
                          int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, map, length, rows, workspace) || lacks_threshold(params->rule, threshold))
        return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<Plan>(workspace, *params);
    const RowCount count = plan.count(rows, rows_int32);
    if (const int status = launch_similarity(*params, tokens, plan.similarity, count, stream)) return status;
    return launch_decision(*params, plan, plan.similarity, threshold, map, length, count, stream);
}

int algm_cuda_clap_apply(const algm_clap_params *params, const void *tokens, const float *size, const void *workspace,
                         int64_t out_rows, void *out_tokens, float *out_size, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (const int status = check_apply(*params, tokens, size, workspace, out_rows, out_tokens, out_size)) return status;
    const auto plan = plan_in<Plan>(workspace, *params);
    const Grid grid(*params);
    const ApplyShape shape = {grid.rows, grid.rows, grid.width, out_rows, plan.rows, plan.length, nullptr, plan.ragged};
    // An output never has more rows than the input, unless the caller asked for more padding.
    const int64_t singles = (out_rows > grid.rows ? out_rows : grid.rows) - int64_t{grid.windows} * grid.members;
    const int64_t items = grid.windows + ceil_div(singles, kGroup);
    const bool aligned = is_aligned(tokens) && is_aligned(out_tokens);
    return with_apply_grid(
        params->dtype, grid.width, items, aligned, [&](auto type, auto pack, unsigned blocks, int spans) {
            using T = decltype(type);
            constexpr int V = decltype(pack)::value;
            const Blocks all = {dim3(blocks, static_cast<unsigned>(params->batch)), kApplyWarps * kWarp};
            return launch<true>(grid.members <= kGroup ? apply_kernel<T, V, true> : apply_kernel<T, V, false>, all,
                                stream, shape, grid, static_cast<int>(items), spans, plan.new_row,
                                static_cast<const T *>(tokens), size, static_cast<T *>(out_tokens), out_size);
        });
}

#include "apply.cuh"
#include "matches.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int64_t kSmallestTile = NarrowTile::SIDE;  // the most partial results that a row can have come from here

// The plan, and what the similarity kernel leaves for the decision: the best match of every row within each tile.
struct Workspace {
    GbmPlan plan;
    Match *partial;  // (B, A, tiles)

    Workspace(const algm_gbm_params &p, Carver &carver)
        : plan(p, carver), partial(carver.take<Match>(p.batch * max_a(p) * ceil_div(max_b(p), kSmallestTile))) {}
};

Sets sets_of(const algm_gbm_params &p, const int64_t *length) {
    return {static_cast<int>(p.rows),
            static_cast<int>(p.width),
            static_cast<int>(first_a(p)),
            static_cast<int>(first_b(p)),
            static_cast<int>(max_a(p)),
            0,
            length};
}

template <class T, class Tile>
int launch_tensor(const algm_gbm_params &p, Sets *sets, const void *tokens, Match *partial, const RowCount &count,
                  void *stream) {
    const cudaError_t error = cudaFuncSetAttribute(tensor_match_kernel<T, Tile>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED_BYTES);
    if (error != cudaSuccess) return status_of(error);
    sets->tiles = static_cast<int>(ceil_div(max_b(p), Tile::SIDE));
    const dim3 grid(sets->tiles, static_cast<unsigned>(ceil_div(max_a(p), Tile::SIDE)), static_cast<unsigned>(p.batch));
    tensor_match_kernel<T, Tile><<<grid, Tile::THREADS, Tile::SHARED_BYTES, stream_of(stream)>>>(
        *sets, static_cast<const T *>(tokens), partial, count);
    return launched();
}

// Narrow tiles where wide ones would leave multiprocessors idle. Either choice gives the same result.
template <class T>
int launch_tensor(const algm_gbm_params &p, Sets *sets, const void *tokens, Match *partial, const RowCount &count,
                  void *stream) {
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return status_of(error);
    const int64_t blocks = p.batch * ceil_div(max_a(p), WideTile::SIDE) * ceil_div(max_b(p), WideTile::SIDE);
    return blocks < multiprocessors ? launch_tensor<T, NarrowTile>(p, sets, tokens, partial, count, stream)
                                    : launch_tensor<T, WideTile>(p, sets, tokens, partial, count, stream);
}

// sm_75 has no bf16 tensor cores. What counts is the architecture the kernel was compiled for: code for sm_75 that the
// driver translates for a later GPU lacks the instruction too.
int has_bf16_tensor_cores(bool *has) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, tensor_match_kernel<__nv_bfloat16, WideTile>);
    *has = error == cudaSuccess && attributes.ptxVersion >= 80;
    return status_of(error);
}

// Queues the kernel that fills `partial`, clears the row count, and sets sets->tiles; without a pair there is nothing
// to fill.
int launch_matches(const algm_gbm_params &p, Sets *sets, const void *tokens, Match *partial, const RowCount &count,
                   void *stream) {
    if (max_a(p) == 0 || max_b(p) == 0) return count.rows == nullptr ? ALGM_OK : count.clear_on(stream_of(stream));
    const bool packed = is_aligned(tokens) && p.width % 8 == 0;
    if (packed && p.dtype == ALGM_FLOAT16) return launch_tensor<__half>(p, sets, tokens, partial, count, stream);
    bool tensor_bf16 = false;
    if (packed && p.dtype == ALGM_BFLOAT16)
        if (const int status = has_bf16_tensor_cores(&tensor_bf16)) return status;
    if (tensor_bf16) return launch_tensor<__nv_bfloat16>(p, sets, tokens, partial, count, stream);
    sets->tiles = static_cast<int>(ceil_div(max_b(p), PlainTile::B));
    const dim3 grid(sets->tiles, static_cast<unsigned>(ceil_div(max_a(p), PlainTile::A)),
                    static_cast<unsigned>(p.batch));
    return with_dtype(p.dtype, p.width, is_aligned(tokens), [&](auto type, auto pack) {
        using T = decltype(type);
        plain_match_kernel<T, decltype(pack)::value>
            <<<grid, PlainTile::THREADS, 0, stream_of(stream)>>>(*sets, static_cast<const T *>(tokens), partial, count);
        return launched();
    });
}

// Where the decision finds the best match of a row: in partial results (tokens were given) or in arrays.
struct Matches {
    Sets sets;
    const Match *partial;
    const float *best;
    const int32_t *best_row;

    // The best match of row i of set A of an image; its column as a row of the sequence, -1 for none.
    __device__ Match at(int image, int i) const {
        const int64_t index = int64_t{image} * sets.a_max + i;
        if (partial == nullptr) return {best[index], best_row[index]};
        Match match = no_match();
#pragma unroll 4
        for (int t = 0; t < sets.tiles; ++t) {
            const Match other = partial[index * sets.tiles + t];
            match.take(other.similarity, other.column);
        }
        return {match.similarity, match.similarity > -INFINITY ? sets.b0 + 2 * match.column : -1};
    }

    __device__ float similarity(int image, int i) const {
        const int64_t index = int64_t{image} * sets.a_max + i;
        if (partial == nullptr) return best[index];
        float largest = -INFINITY;
        for (int t = 0; t < sets.tiles; ++t) largest = fmaxf(largest, partial[index * sets.tiles + t].similarity);
        return largest;
    }
};

__global__ void collect_kernel(Matches matches, float *best, int32_t *best_row) {
    const int image = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= matches.sets.a_max) return;
    const Match match = i < matches.sets.a_count(image) ? matches.at(image, i) : Match{-INFINITY, -1};
    best[int64_t{image} * matches.sets.a_max + i] = match.similarity;
    best_row[int64_t{image} * matches.sets.a_max + i] = match.column;
}

struct Decision {
    Matches matches;
    GbmPlan plan;
    double divisor;
    int batch, prefix;
    int64_t patches;
    bool strict, batch_min, adaptive;
    const float *threshold;
    const int64_t *map;
    int64_t *out_map, *out_length;
    RowCount count;

    __device__ bool reaches(float value, float limit) const {
        return isfinite(value) && (strict ? value > limit : value >= limit);
    }
};

struct Statistics {
    double mean, deviation;
};

// Mean and unbiased deviation of the finite values among `count`, by one warp; NaN where fewer than two exist.
template <class Value>
__device__ Statistics statistics(int count, Value value_of) {
    double sum = 0, squares = 0;
    int finite = 0;
#pragma unroll 4
    for (int i = lane_index(); i < count; i += kWarp) {
        const float value = value_of(i);
        sum += isfinite(value) ? value : 0.0f;
        finite += isfinite(value);
    }
    sum = warp_sum(sum);
    finite = warp_sum(finite);
    if (finite < 2) return {nan(""), nan("")};
    const double mean = sum / finite;
#pragma unroll 4
    for (int i = lane_index(); i < count; i += kWarp) {
        const float value = value_of(i);
        const double difference = isfinite(value) ? value - mean : 0;
        squares += difference * difference;
    }
    return {mean, sqrt(warp_sum(squares) / (finite - 1))};
}

__device__ float limit_from(const Decision &d, double mean, double deviation) {
    return static_cast<float>(mean + static_cast<double>(*d.threshold) * deviation / d.divisor);
}

// The threshold that all images of a batch share: one warp an image, added up in the order of the images.
__device__ float common_limit(const Decision &d) {
    __shared__ Statistics shared[kWarp];
    const int warps = blockDim.x / kWarp;
    Statistics sum = {0, 0};
    for (int start = 0; start < d.batch; start += warps) {
        const int image = start + warp_index();
        __syncthreads();
        if (image < d.batch) {
            const Statistics one =
                statistics(d.matches.sets.a_count(image), [&](int i) { return d.matches.similarity(image, i); });
            if (lane_index() == 0) shared[warp_index()] = one;
        }
        __syncthreads();
        for (int w = 0; w < warps && start + w < d.batch; ++w) {
            sum.mean += shared[w].mean;
            sum.deviation += shared[w].deviation;
        }
    }
    return limit_from(d, sum.mean / d.batch, sum.deviation / d.batch);
}

// The threshold of an image that decides alone; `best` is complete.
__device__ float own_limit(const Decision &d, const float *best, int count) {
    __shared__ float limit;
    if (warp_index() == 0) {
        const Statistics one = statistics(count, [&](int i) { return best[i]; });
        if (lane_index() == 0) limit = limit_from(d, one.mean, one.deviation);
    }
    __syncthreads();
    return limit;
}

// The fewest rows that any image would merge: one warp an image.
__device__ int fewest_merges(const Decision &d, float limit) {
    int fewest = INT32_MAX;
    for (int image = warp_index(); image < d.batch; image += blockDim.x / kWarp) {
        int count = 0;
#pragma unroll 4
        for (int i = lane_index(); i < d.matches.sets.a_count(image); i += kWarp)
            count += d.reaches(d.matches.similarity(image, i), limit);
        fewest = min(fewest, warp_sum(count));
    }
    return block_min(fewest);
}

// Sets target[i] for every row of set A: the row it joins, or -1 if it stays or does not exist. Under `batch_min` the
// best `merges` join.
__device__ void choose_targets(const Decision &d, const float *best, const int32_t *best_row, int count, float limit,
                               int merges, int32_t *target) {
    if (!d.batch_min) {
        for (int i = threadIdx.x; i < d.matches.sets.a_max; i += blockDim.x)
            target[i] = i < count && d.reaches(best[i], limit) ? best_row[i] : -1;
    } else {
        for (int start = 0; start < d.matches.sets.a_max; start += blockDim.x / kRankers) {
            const int i = start + threadIdx.x / kRankers;
            const int rank = block_rank(best, count, i);
            if (i < d.matches.sets.a_max && threadIdx.x % kRankers == 0)
                target[i] = i < count && d.reaches(best[i], limit) && rank < merges ? best_row[i] : -1;
        }
    }
    __syncthreads();
}

constexpr int kSharedRows = 2048;  // rows of set A whose similarities fit into shared memory

// One block an image: threshold, who merges, new row numbers, composed map.
__global__ void __launch_bounds__(1024) decide_kernel(Decision d) {
    const Sets &sets = d.matches.sets;
    const int image = blockIdx.x, a_count = sets.a_count(image), b_count = sets.b_count(image);
    const int64_t a_offset = int64_t{image} * sets.a_max, row_offset = int64_t{image} * sets.rows;
    __shared__ float shared_best[kSharedRows];
    float *best = sets.a_max <= kSharedRows ? shared_best : d.plan.best + a_offset;
    int32_t *best_row = d.plan.best_row + a_offset, *target = d.plan.target + a_offset;
    int32_t *row = d.plan.row + row_offset, *source = d.plan.source + row_offset;
    for (int i = threadIdx.x; i < a_count; i += blockDim.x) {
        const Match match = d.matches.at(image, i);
        best[i] = match.similarity;
        best_row[i] = match.column;
    }
    __syncthreads();
    const float limit = !d.adaptive ? *d.threshold : d.batch_min ? common_limit(d) : own_limit(d, best, a_count);
    choose_targets(d, best, best_row, a_count, limit, d.batch_min ? fewest_merges(d, limit) : 0, target);

    for (int r = threadIdx.x; r < d.prefix; r += blockDim.x) row[r] = source[r] = r;
    int next = d.prefix;
    for (int start = 0; start < a_count; start += blockDim.x) {
        const int i = start + threadIdx.x;
        const bool stays = i < a_count && target[i] < 0;
        const int new_row = block_flags_before(stays, next);
        if (stays) {
            row[sets.a0 + 2 * i] = new_row;
            source[new_row] = sets.a0 + 2 * i;
        }
    }
    for (int j = threadIdx.x; j < b_count; j += blockDim.x) {
        row[sets.b0 + 2 * j] = next + j;
        source[next + j] = sets.b0 + 2 * j;
    }
    if (threadIdx.x == 0) {
        d.out_length[image] = d.plan.length[image] = next + b_count;
        d.count.raise(next + b_count);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a_count; i += blockDim.x) {
        if (target[i] < 0) continue;
        const int new_row = next + (target[i] - sets.b0) / 2;
        row[sets.a0 + 2 * i] = new_row;
        source[new_row] = -1 - target[i];  // several rows may write this, all the same value
    }
    __syncthreads();
    const int length = max(sets.end(image), d.prefix);
    for (int64_t p = image * d.patches + threadIdx.x; p < (image + 1) * d.patches; p += blockDim.x) {
        const int64_t from = d.map[p];
        d.out_map[p] = from >= 0 && from < length ? row[from] : -1;
    }
}

int launch_decision(const algm_gbm_params &p, const Workspace &workspace, const Matches &matches, const int64_t *map,
                    const float *threshold, int64_t *out_map, int64_t *out_length, const RowCount &count,
                    void *stream) {
    const Decision decision = {matches,
                               workspace.plan,
                               p.divisor,
                               static_cast<int>(p.batch),
                               static_cast<int>(p.prefix),
                               p.patches,
                               p.semantics == ALGM_SEMANTICS_PAPER,
                               p.batch_mode == ALGM_BATCH_MIN,
                               p.mode == ALGM_MODE_ADAPTIVE,
                               threshold,
                               map,
                               out_map,
                               out_length,
                               count};
    const unsigned threads = block_threads(p.batch * kWarp > p.patches ? p.batch * kWarp : p.patches);
    decide_kernel<<<static_cast<unsigned>(p.batch), threads, 0, stream_of(stream)>>>(decision);
    return launched();
}

// A row of set B and every row of set A that joins it, in ascending order. Rows of set B come last in the output and a
// popular one takes longest, so these start first.
struct JoinedRows {
    static constexpr bool kLongRowsLast = true;
    static constexpr int kTogether = 2, kPacks = 2, kBlocks = 4;  // mostly pairs
    const int32_t *target;
    int a0, a_max;

    template <class Add>
    __device__ void visit(int image, int row, int *list, Add add) const {
        if (lane_index() == 0) list[0] = row;
        int count = 1;
        const int32_t *targets = target + int64_t{image} * a_max;
#pragma unroll 4
        for (int start = 0; start < a_max; start += kWarp) {
            const int i = start + lane_index();
            const bool joins = i < a_max && targets[i] == row;
            const unsigned joined = __ballot_sync(kAllLanes, joins);
            if (joined == 0) continue;
            if (count + __popc(joined) > kMemberList) {
                __syncwarp();
                add(count);
                __syncwarp();
                count = 0;
            }
            if (joins) list[count + __popc(joined & lanes_below())] = a0 + 2 * i;
            count += __popc(joined);
        }
        __syncwarp();
        add(count);
    }
};

}  // namespace

size_t algm_cuda_gbm_workspace(const algm_gbm_params *params) {
    if (check_batch(params) != ALGM_OK) return 0;
    Carver carver(nullptr);
    Workspace(*params, carver);
    return carver.used();
}

int64_t algm_cuda_gbm_candidates(const algm_gbm_params *params) {
    return check_batch(params) == ALGM_OK ? max_a(*params) : 0;
}

int algm_cuda_gbm_similarity(const algm_gbm_params *params, const void *tokens, const int64_t *length, float *best,
                             int32_t *best_row, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, length, workspace) || is_missing(best, max_a(*params)) || is_missing(best_row, max_a(*params)))
        return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    const Workspace parts(*params, carver);
    Sets sets = sets_of(*params, length);
    if (sets.a_max == 0) return ALGM_OK;
    if (const int status = launch_matches(*params, &sets, tokens, parts.partial, {}, stream)) return status;
    const dim3 grid(static_cast<unsigned>(ceil_div(sets.a_max, 256)), static_cast<unsigned>(params->batch));
    collect_kernel<<<grid, 256, 0, stream_of(stream)>>>({sets, parts.partial, nullptr, nullptr}, best, best_row);
    return launched();
}

int algm_cuda_gbm_decide_given(const algm_gbm_params *params, const float *best, const int32_t *best_row,
                               const int64_t *map, const int64_t *length, const float *threshold, int64_t *out_map,
                               int64_t *out_length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(map, length, threshold, out_map, out_length, rows, workspace) || is_missing(best, max_a(*params)) ||
        is_missing(best_row, max_a(*params)))
        return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    const Workspace parts(*params, carver);
    const RowCount count = {rows, parts.plan.rows, rows_int32};
    if (const int status = count.clear_on(stream_of(stream))) return status;
    const Matches matches = {sets_of(*params, length), nullptr, best, best_row};
    return launch_decision(*params, parts, matches, map, threshold, out_map, out_length, count, stream);
}

int algm_cuda_gbm_decide(const algm_gbm_params *params, const void *tokens, const int64_t *map, const int64_t *length,
                         const float *threshold, int64_t *out_map, int64_t *out_length, int64_t *rows,
                         int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, map, length, threshold, out_map, out_length, rows, workspace)) return ALGM_INVALID_ARGUMENT;
    Carver carver(workspace);
    const Workspace parts(*params, carver);
    Sets sets = sets_of(*params, length);
    const RowCount count = {rows, parts.plan.rows, rows_int32};
    if (const int status = launch_matches(*params, &sets, tokens, parts.partial, count, stream)) return status;
    const Matches matches = {sets, parts.partial, nullptr, nullptr};
    return launch_decision(*params, parts, matches, map, threshold, out_map, out_length, count, stream);
}

int algm_cuda_gbm_apply(const algm_gbm_params *params, const void *tokens, const float *size, const void *workspace,
                        int64_t out_rows, void *out_tokens, float *out_size, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, size, workspace, out_tokens, out_size)) return ALGM_INVALID_ARGUMENT;
    Carver carver(const_cast<void *>(workspace));
    const Workspace parts(*params, carver);
    const ApplyShape shape = {static_cast<int>(params->rows),
                              static_cast<int>(params->width),
                              out_rows,
                              parts.plan.rows,
                              parts.plan.length,
                              parts.plan.source,
                              params->semantics == ALGM_SEMANTICS_CODE};
    const JoinedRows members = {parts.plan.target, static_cast<int>(first_a(*params)),
                                static_cast<int>(max_a(*params))};
    return launch_apply(params->dtype, params->batch, shape, members, tokens, size, out_tokens, out_size, stream);
}

#include "apply.cuh"
#include "matches.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

// The rows of set A that join one row of set B: how many, the first and the last.
struct Joins {
    int32_t count, first, last;
};

constexpr int64_t kSmallestTile = 32;  // the most partial results that a row can have come from tiles of this side

// A row of `new_row` is -1 - row where others join it, kNoRow where it joins another.
struct Plan : MergePlan {
    int32_t *target;  // (B,A) index in set B that the i-th row of set A joins, -1 if it stays
    Joins *joins;     // (B, rows of set B)
    float *best;      // (B,A)
    int32_t *row;     // (B,S) output row of every input row, those that join included
    Match *partial;   // (B,A,tiles) the best match of every row within each tile

    Plan(const algm_gbm_params &p, Carver &carver)
        : MergePlan(p, carver),
          target(carver.take<int32_t>(p.batch * max_a(p))),
          joins(carver.take<Joins>(p.batch * max_b(p))),
          best(carver.take<float>(p.batch * max_a(p))),
          row(carver.take<int32_t>(p.batch * most_rows(p))),
          partial(carver.take<Match>(p.batch * max_a(p) * ceil_div(max_b(p), kSmallestTile))) {}
};

Sets sets_of(const algm_gbm_params &p, const int64_t *length) {
    return {static_cast<int>(most_rows(p)),
            static_cast<int>(p.width),
            static_cast<int>(first_a(p)),
            static_cast<int>(first_b(p)),
            static_cast<int>(max_a(p)),
            static_cast<int>(max_b(p)),
            0,
            reads_ragged(p.ragged) ? 0 : static_cast<int>(p.rows),
            length};
}

// Tiles side by side, for the launch of a kernel that fills `partial`.
template <class Tile>
dim3 tile_grid(const algm_gbm_params &p) {
    static_assert(Tile::B >= kSmallestTile, "the workspace has room for the results of tiles of that side");
    return dim3(static_cast<unsigned>(ceil_div(max_b(p), Tile::B)), static_cast<unsigned>(ceil_div(max_a(p), Tile::A)),
                static_cast<unsigned>(p.batch));
}

// Shared memory of a multiprocessor of GeForce and RTX cards of compute capability 8.6, 8.9 and 12.0; those of data
// centres have 164 KiB and more, Turing has 64. The system takes some of every block.
constexpr int kLittleSharedBytes = 100 << 10, kReservedBytes = 1 << 10;

template <class Tile>
constexpr bool fits_a_small_multiprocessor = Tile::BLOCKS * (Tile::SHARED_BYTES + kReservedBytes) <= kLittleSharedBytes;

// Tiles that the busiest multiprocessor computes.
template <class Tile>
int64_t rounds(const algm_gbm_params &p, int multiprocessors) {
    const dim3 grid = tile_grid<Tile>(p);
    return ceil_div(int64_t{grid.x} * grid.y * grid.z, multiprocessors);
}

// What the launch of a kernel of matches needs to know.
struct MatchLaunch {
    const algm_gbm_params &p;
    Sets *sets;
    const void *tokens;
    Match *partial;
    RowCount count;
    void *stream;
    int multiprocessors, shared_bytes, multiprocessor_bytes;

    template <class T, class Tile>
    int with_tile() const {
        const dim3 grid = tile_grid<Tile>(p);
        sets->tiles = static_cast<int>(grid.x);
        if (grid.y > kMaxBlocksBeside) return ALGM_UNSUPPORTED;
        return launch<false, Tile::SHARED_BYTES>(tensor_match_kernel<T, Tile>,
                                                 {grid, Tile::THREADS, Tile::SHARED_BYTES}, stream, *sets,
                                                 static_cast<const T *>(tokens), partial, count);
    }

    // Loading bounds these tiles: the best has the fewest rows to load on the busiest multiprocessor. The largest ones
    // do not fit into every GPU's shared memory.
    template <class T, class Tile, class... Larger>
    int with_best_tile() const {
        const auto cost = [&](auto tile) -> int64_t {
            using Other = decltype(tile);
            if (Other::SHARED_BYTES > shared_bytes) return INT64_MAX;
            return rounds<Other>(p, multiprocessors) * (Other::A + Other::B);
        };
        if constexpr (sizeof...(Larger) > 0)
            if (((cost(Larger{}) < cost(Tile{})) || ...)) return with_best_tile<T, Larger...>();
        return with_tile<T, Tile>();
    }

    template <class T>
    int with_type(bool warpgroups) const {
        if (warpgroups)
            return with_best_tile<T, WarpgroupTile<1, 32, 6, 2>, WarpgroupTile<2, 64, 4, 1>,
                                  WarpgroupTile<3, 192, 4, 1>>();
        if (multiprocessor_bytes <= kLittleSharedBytes) return with_fewer_stages<T>();
        return with_best_tile<T, WarpTile<32, 2, 2, 6, 4>, WarpTile<64, 2, 2, 3, 2>, WarpTile<160, 2, 4, 4, 1>>();
    }

    // As many blocks of a tile side by side as above, and one fewer of the smallest.
    template <class T>
    int with_fewer_stages() const {
        using Small = WarpTile<32, 2, 2, 3, 3>;
        using Middle = WarpTile<64, 2, 2, 2, 2>;
        using Large = WarpTile<160, 2, 4, 2, 1>;
        static_assert(fits_a_small_multiprocessor<Small> && fits_a_small_multiprocessor<Middle> &&
                      fits_a_small_multiprocessor<Large>);
        return with_best_tile<T, Small, Middle, Large>();
    }

    template <class Tile>
    int with_plain_tile() const {
        const dim3 grid = tile_grid<Tile>(p);
        sets->tiles = static_cast<int>(grid.x);
        if (grid.y > kMaxBlocksBeside) return ALGM_UNSUPPORTED;
        return with_dtype(p.dtype, p.width, is_aligned(tokens), [&](auto type, auto pack) {
            using T = decltype(type);
            return launch<false>(plain_match_kernel<T, decltype(pack)::value, Tile>, {grid, Tile::THREADS}, stream,
                                 *sets, static_cast<const T *>(tokens), partial, count);
        });
    }

    // Arithmetic bounds these: the best has the fewest products.
    int plain() const {
        using Small = PlainTile<64, 2>;
        using Large = PlainTile<160, 1>;
        const bool large = rounds<Large>(p, multiprocessors) * Large::A * Large::B <=
                           rounds<Small>(p, multiprocessors) * Small::A * Small::B;
        return large ? with_plain_tile<Large>() : with_plain_tile<Small>();
    }
};

// Queues the kernel that fills `partial`, clears the row count, and sets sets->tiles; without a pair there is nothing
// to fill.
int launch_matches(const algm_gbm_params &p, Sets *sets, const void *tokens, Match *partial, const RowCount &count,
                   void *stream) {
    if (max_a(p) == 0 || max_b(p) == 0) return count.rows == nullptr ? ALGM_OK : clear_on(stream, count);
    const bool is_bf16 = p.dtype == ALGM_BFLOAT16;
    bool tensor = is_aligned(tokens) && p.width % 8 == 0 && p.dtype != ALGM_FLOAT32;
    if (tensor)
        if (const int status =
                has_tensor_cores(tensor_match_kernel<__nv_bfloat16, WarpTile<64, 2, 2, 3, 2>>, is_bf16, &tensor))
            return status;
    bool warpgroups = false;
    if (const int status = has_warpgroups(&warpgroups)) return status;
    int multiprocessors = 0, shared_bytes = 0, multiprocessor_bytes = 0;
    if (const int status = device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors)) return status;
    if (const int status = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes)) return status;
    if (const int status = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &multiprocessor_bytes))
        return status;
#ifdef ALGM_SHARED_BYTES  // the tests try what a smaller card would do
    multiprocessor_bytes = ALGM_SHARED_BYTES, shared_bytes = ALGM_SHARED_BYTES - kReservedBytes;
#endif
    const MatchLaunch matches = {p,      sets,            tokens,       partial,             count,
                                 stream, multiprocessors, shared_bytes, multiprocessor_bytes};
    if (!tensor) return matches.plain();
    return is_bf16 ? matches.with_type<__nv_bfloat16>(warpgroups) : matches.with_type<__half>(warpgroups);
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
    wait_for_previous();
    if (i >= matches.sets.a_max) return;
    const Match match = i < matches.sets.a_count(image) ? matches.at(image, i) : Match{-INFINITY, -1};
    best[int64_t{image} * matches.sets.a_max + i] = match.similarity;
    best_row[int64_t{image} * matches.sets.a_max + i] = match.column;
}

struct Decision {
    Matches matches;
    Plan plan;
    double divisor;
    int batch, prefix, budget;
    int64_t patches;
    bool strict, batch_min, adaptive, counted;
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

// Mean and unbiased deviation of the finite values among `count`, by one warp; NaN where fewer than two exist. In one
// pass: squares are those of distances from one of the values, so nothing cancels but what is small already.
template <class Value>
__device__ Statistics statistics(int count, Value value_of) {
    double sum = 0, distances = 0, squares = 0;
    int finite = 0;
    const float first = count > 0 ? value_of(0) : 0;
    const double pivot = isfinite(first) ? first : 0;
#pragma unroll 4
    for (int i = lane_index(); i < count; i += kWarp) {
        const float value = value_of(i);
        const double distance = isfinite(value) ? value - pivot : 0;
        sum += isfinite(value) ? value : 0;
        distances += distance;
        squares += distance * distance;
        finite += isfinite(value);
    }
    sum = warp_sum(sum);
    distances = warp_sum(distances);
    squares = warp_sum(squares);
    finite = warp_sum(finite);
    if (finite < 2) return {nan(""), nan("")};
    return {sum / finite, sqrt(fmax(squares - distances * distances / finite, 0.0) / (finite - 1))};
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

// Unsets target[i] where a row of set A is not among the best `merges`.
__device__ void keep_best(const float *best, int count, int merges, int32_t *target) {
    __syncthreads();
    for (int start = 0; start < count; start += blockDim.x / kRankers) {
        const int i = start + threadIdx.x / kRankers;
        const int rank = rank_of(best, count, i);
        if (i < count && threadIdx.x % kRankers == 0 && rank >= merges) target[i] = -1;
    }
    __syncthreads();
}

// Unsets target[i] where a row of set A stays: all that do not reach the limit and, under `batch_min`, all but the best
// `merges`.
__device__ void choose_targets(const Decision &d, const float *best, int count, float limit, int32_t *target) {
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        if (!d.reaches(best[i], limit)) target[i] = -1;
    if (!d.batch_min) return;  // every thread goes on with the targets that it wrote
    keep_best(best, count, fewest_merges(d, limit), target);
}

constexpr int kSharedRows = 2304;  // rows of a sequence whose plan fits into shared memory
constexpr int kSharedHalf = kSharedRows / 2;

// One block an image: threshold, who merges, new row numbers, composed map.
__global__ void __launch_bounds__(1024) decide_kernel(Decision d) {
    __shared__ float shared_best[kSharedHalf];
    __shared__ int32_t shared_target[kSharedHalf], shared_row[kSharedRows];
    __shared__ Joins shared_joins[kSharedHalf];
    const Sets &sets = d.matches.sets;
    const int image = blockIdx.x, a_count = sets.a_count(image), b_count = sets.b_count(image);
    const int64_t a_offset = int64_t{image} * sets.a_max, b_offset = int64_t{image} * sets.b_max;
    const bool fits = sets.rows <= kSharedRows && sets.a_max <= kSharedHalf && sets.b_max <= kSharedHalf;
    float *best = fits ? shared_best : d.plan.best + a_offset;
    int32_t *target = fits ? shared_target : d.plan.target + a_offset;
    Joins *joins = fits ? shared_joins : d.plan.joins + b_offset;
    int32_t *row = fits ? shared_row : d.plan.row + int64_t{image} * sets.rows;
    int32_t *new_row = d.plan.new_row + int64_t{image} * sets.rows;
    const int64_t *map = d.map + image * d.patches;
    int64_t from = threadIdx.x < d.patches ? map[threadIdx.x] : -1;
    for (int j = threadIdx.x; j < b_count; j += blockDim.x) joins[j] = {0, INT32_MAX, -1};
    wait_for_previous();

    for (int i = threadIdx.x; i < a_count; i += blockDim.x) {
        const Match match = d.matches.at(image, i);
        // By budget a row without a match, whose similarities are no numbers, comes last and may join the first row.
        best[i] = d.counted && isnan(match.similarity) ? -INFINITY : match.similarity;
        target[i] = match.column >= 0 ? (match.column - sets.b0) / 2 : d.counted && b_count > 0 ? 0 : -1;
    }
    __syncthreads();
    let_next_start();  // not before: what it loads would delay the matches
    if (d.counted) {
        keep_best(best, a_count, d.budget, target);
    } else {
        const float limit = !d.adaptive ? *d.threshold : d.batch_min ? common_limit(d) : own_limit(d, best, a_count);
        choose_targets(d, best, a_count, limit, target);
    }

    for (int r = threadIdx.x; r < d.prefix; r += blockDim.x) row[r] = new_row[r] = r;
    int next = d.prefix;
    for (int start = 0; start < a_count; start += blockDim.x) {
        const int i = start + threadIdx.x, joined = i < a_count ? target[i] : -1, old_row = sets.a0 + 2 * i;
        const bool stays = i < a_count && joined < 0;
        const int place = block_flags_before(stays, next);
        if (stays) row[old_row] = new_row[old_row] = place;
        if (joined < 0) continue;
        new_row[old_row] = kNoRow;
        atomicAdd(&joins[joined].count, 1);
        atomicMin(&joins[joined].first, i);
        atomicMax(&joins[joined].last, i);
    }
    if (threadIdx.x == 0) {
        d.out_length[image] = d.plan.length[image] = next + b_count;
        d.count.raise(next + b_count);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < b_count; j += blockDim.x) {
        const int old_row = sets.b0 + 2 * j;
        row[old_row] = next + j;
        new_row[old_row] = joins[j].count > 0 ? -1 - (next + j) : next + j;
        if (fits) d.plan.joins[b_offset + j] = joins[j];
    }
    const int length = max(sets.end(image), d.prefix);
    for (int r = length + threadIdx.x; r < sets.rows; r += blockDim.x) new_row[r] = kNoRow;
    for (int i = threadIdx.x; i < a_count; i += blockDim.x) {
        if (target[i] >= 0) row[sets.a0 + 2 * i] = next + target[i];
        if (fits) d.plan.target[a_offset + i] = target[i];
    }
    __syncthreads();
    for (int64_t p = threadIdx.x; p < d.patches; p += blockDim.x) {
        d.out_map[image * d.patches + p] = from >= 0 && from < length ? row[from] : -1;
        from = p + blockDim.x < d.patches ? map[p + blockDim.x] : -1;
    }
}

int launch_decision(const algm_gbm_params &p, const Plan &plan, const Matches &matches, const int64_t *map,
                    const float *threshold, int64_t *out_map, int64_t *out_length, const RowCount &count,
                    void *stream) {
    const Decision decision = {matches,
                               plan,
                               p.divisor,
                               static_cast<int>(p.batch),
                               static_cast<int>(p.prefix),
                               static_cast<int>(p.budget < most_rows(p) ? p.budget : most_rows(p)),
                               p.patches,
                               p.semantics == ALGM_SEMANTICS_PAPER,
                               p.batch_mode == ALGM_BATCH_MIN,
                               p.rule == ALGM_RULE_ADAPTIVE,
                               counts_merges(p.rule),
                               threshold,
                               map,
                               out_map,
                               out_length,
                               count};
    const unsigned threads = block_threads(p.batch * kWarp > p.patches ? p.batch * kWarp : p.patches);
    return launch<true>(decide_kernel, {dim3(static_cast<unsigned>(p.batch)), threads}, stream, decision);
}

// The rows of set A of an image that join rows of set B, in ascending order.
struct Joiners {
    const int32_t *target;
    int a0;

    // Calls add(rows) with two rows at a time, the second kNoRow where the number is odd. Called by all lanes.
    template <class Add>
    __device__ void visit(const Joins &joins, int joined, Add add) const {
        int waiting = kNoRow;
        for (int start = joins.first; start <= joins.last; start += kWarp) {
            const int i = start + lane_index();
            const bool joins_this = i <= joins.last && target[i] == joined;
            for (unsigned left = __ballot_sync(kAllLanes, joins_this); left != 0; left &= left - 1) {
                const int row = a0 + 2 * (start + __ffs(left) - 1);
                if (waiting != kNoRow) add(waiting, row);
                waiting = waiting == kNoRow ? row : kNoRow;
            }
        }
        if (waiting != kNoRow) add(waiting, kNoRow);
    }
};

// A warp carries a span of kGroup neighbouring rows to where the plan says. Those that others join wait for these: most
// often one or two.
template <class T, int V>
__global__ void __launch_bounds__(kApplyWarps *kWarp, 3)
    apply_kernel(ApplyShape shape, Sets sets, bool weighted, int items, int spans, Plan plan, const T *tokens,
                 const float *size, T *out_tokens, float *out_size) {
    const int unit = blockIdx.x * kApplyWarps + warp_index(), item = unit / spans;
    if (item >= items) return;
    // Last image first: decide read the images in order, so the last ones are still in the cache.
    const int image = gridDim.y - 1 - blockIdx.y;
    Rows<T, V> rows(shape, image, unit % spans, tokens, size);
    Bits<T, V> early[kGroup][kSpanPacks];
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
#pragma unroll
        for (int i = 0; i < kSpanPacks; ++i)
            if (rows.has(item * kGroup + g, i)) early[g][i] = rows.load(item * kGroup + g, i);
    wait_for_previous();
    rows.find_output(shape, image, out_tokens, out_size);
    const int lane_row = item * kGroup + lane_index() % kGroup;
    const bool exists = lane_row < rows.rows_in;
    const bool moves = exists && rows.has_room();
    const int lane_target = moves ? plan.new_row[int64_t{image} * sets.rows + lane_row] : kNoRow;
    const float lane_size = exists ? rows.size[lane_row] : 0;
    if (lane_target >= 0 && lane_target != kNoRow) rows.store_size(lane_target, lane_size, kGroup);
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
        const int target = __shfl_sync(kAllLanes, lane_target, g);
        if (target < 0 || target == kNoRow) continue;
#pragma unroll
        for (int i = 0; i < kSpanPacks; ++i) rows.store(target, i, early[g][i]);
    }
    rows.write_padding(lane_row);
    if (!__any_sync(kAllLanes, lane_target < 0)) return;

    const Joiners joiners = {plan.target + int64_t{image} * sets.a_max, sets.a0};
    const int lane_joined = (lane_row - sets.b0) / 2;
    const Joins lane_joins = lane_target < 0 ? plan.joins[int64_t{image} * sets.b_max + lane_joined] : Joins{};
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
        const int target = __shfl_sync(kAllLanes, lane_target, g);
        if (target >= 0) continue;
        const Joins joins = {0, __shfl_sync(kAllLanes, lane_joins.first, g),
                             __shfl_sync(kAllLanes, lane_joins.last, g)};
        const int joined = __shfl_sync(kAllLanes, lane_joined, g);
        float total = __shfl_sync(kAllLanes, lane_size, g);
        Mean<T, V> means[kSpanPacks];
#pragma unroll
        for (int i = 0; i < kSpanPacks; ++i) means[i].add(early[g][i], weighted ? total : 1);
        joiners.visit(joins, joined, [&](int first, int second) {
            const int both[2] = {first, second == kNoRow ? first : second};
            Bits<T, V> values[2][kSpanPacks];
            float sizes[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                sizes[m] = rows.size[both[m]];
#pragma unroll
                for (int i = 0; i < kSpanPacks; ++i)
                    if (rows.has(both[m], i)) values[m][i] = rows.load(both[m], i);
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if (m == 1 && second == kNoRow) break;
                total += sizes[m];
#pragma unroll
                for (int i = 0; i < kSpanPacks; ++i) means[i].add(values[m][i], weighted ? sizes[m] : 1);
            }
        });
#pragma unroll
        for (int i = 0; i < kSpanPacks; ++i) rows.store(-1 - target, i, means[i].value());
        rows.store_size(-1 - target, total, 1);
    }
}

}  // namespace

size_t algm_cuda_gbm_workspace(const algm_gbm_params *params) {
    return check_batch(params) == ALGM_OK ? plan_bytes<Plan>(*params) : 0;
}

int64_t algm_cuda_gbm_candidates(const algm_gbm_params *params) {
    return check_batch(params) == ALGM_OK ? max_a(*params) : 0;
}

int algm_cuda_gbm_similarity(const algm_gbm_params *params, const void *tokens, const int64_t *length, float *best,
                             int32_t *best_row, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, length, workspace) || lacks_matches(*params, best, best_row)) return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<Plan>(workspace, *params);
    Sets sets = sets_of(*params, length);
    if (sets.a_max == 0) return ALGM_OK;
    if (const int status = launch_matches(*params, &sets, tokens, plan.partial, {}, stream)) return status;
    const dim3 grid(static_cast<unsigned>(ceil_div(sets.a_max, 256)), static_cast<unsigned>(params->batch));
    return launch<true>(collect_kernel, {grid, 256}, stream, Matches{sets, plan.partial, nullptr, nullptr}, best,
                        best_row);
}

int algm_cuda_gbm_decide_given(const algm_gbm_params *params, const float *best, const int32_t *best_row,
                               const int64_t *map, const int64_t *length, const float *threshold, int64_t *out_map,
                               int64_t *out_length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(map, length, out_map, out_length, rows, workspace) || lacks_threshold(params->rule, threshold) ||
        lacks_matches(*params, best, best_row))
        return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<Plan>(workspace, *params);
    const RowCount count = plan.count(rows, rows_int32);
    if (const int status = clear_on(stream, count)) return status;
    const Matches matches = {sets_of(*params, length), nullptr, best, best_row};
    return launch_decision(*params, plan, matches, map, threshold, out_map, out_length, count, stream);
}

int algm_cuda_gbm_decide(const algm_gbm_params *params, const void *tokens, const int64_t *map, const int64_t *length,
                         const float *threshold, int64_t *out_map, int64_t *out_length, int64_t *rows,
                         int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (any_null(tokens, map, length, out_map, out_length, rows, workspace) ||
        lacks_threshold(params->rule, threshold))
        return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<Plan>(workspace, *params);
    Sets sets = sets_of(*params, length);
    const RowCount count = plan.count(rows, rows_int32);
    if (const int status = launch_matches(*params, &sets, tokens, plan.partial, count, stream)) return status;
    const Matches matches = {sets, plan.partial, nullptr, nullptr};
    return launch_decision(*params, plan, matches, map, threshold, out_map, out_length, count, stream);
}

int algm_cuda_gbm_apply(const algm_gbm_params *params, const void *tokens, const float *size, const int64_t *length,
                        const void *workspace, int64_t out_rows, void *out_tokens, float *out_size, void *stream) {
    if (const int status = check_batch(params)) return status;
    if (const int status = check_apply(*params, tokens, size, workspace, out_rows, out_tokens, out_size)) return status;
    const bool ragged = reads_ragged(params->ragged);
    if (lacks_rows(*params, out_rows) || (ragged && length == nullptr)) return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<Plan>(workspace, *params);
    const Sets sets = sets_of(*params, length);
    const ApplyShape shape = {sets.rows,
                              static_cast<int>(params->rows),
                              sets.width,
                              out_rows,
                              plan.rows,
                              plan.length,
                              ragged ? length : nullptr,
                              plan.ragged};
    // An output never has more rows than the input, unless the caller asked for more padding.
    const int64_t most = params->rows > sets.rows ? params->rows : sets.rows;
    const int64_t items = ceil_div(out_rows > most ? out_rows : most, kGroup);
    const bool weighted = params->semantics == ALGM_SEMANTICS_CODE;
    const bool aligned = is_aligned(tokens) && is_aligned(out_tokens);
    return with_apply_grid(
        params->dtype, sets.width, items, aligned, [&](auto type, auto pack, unsigned blocks, int spans) {
            using T = decltype(type);
            const Blocks all = {dim3(blocks, static_cast<unsigned>(params->batch)), kApplyWarps * kWarp};
            return launch<true>(apply_kernel<T, decltype(pack)::value>, all, stream, shape, sets, weighted,
                                static_cast<int>(items), spans, plan, static_cast<const T *>(tokens), size,
                                static_cast<T *>(out_tokens), out_size);
        });
}

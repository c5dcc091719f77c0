// The best match in set B for every row of set A: a tiled matrix product whose tiles are reduced to one maximum a row
// before they leave the chip. One kernel for tensor cores (16-bit tokens), one with fp32 multiply-adds for the rest.
#pragma once

#include "tensor.cuh"

namespace algm::cuda {

struct Match {
    float similarity;  // -infinity: none
    int32_t column;    // index in set B

    // The lower column wins ties; NaN never wins.
    __device__ void take(float other_similarity, int other_column) {
        if (other_similarity > similarity || (other_similarity == similarity && other_column < column)) {
            similarity = other_similarity;
            column = other_column;
        }
    }
};

__device__ inline Match no_match() { return {-INFINITY, INT32_MAX}; }

// The best of the `lanes` neighbouring lanes.
__device__ inline Match best_of_lanes(Match match, int lanes) {
    for (int offset = 1; offset < lanes; offset *= 2) {
        const float similarity = __shfl_xor_sync(kAllLanes, match.similarity, offset);
        const int column = __shfl_xor_sync(kAllLanes, match.column, offset);
        match.take(similarity, column);
    }
    return match;
}

// Sets A and B as rows of the sequences; `tiles` is the grid's extent in B, one partial result each.
struct Sets {
    int rows, width, a0, b0, a_max, b_max, tiles;  // rows: that an image can have
    int rows_apart;                                // of two images; 0: they are ragged
    const int64_t *length;

    __device__ int end(int image) const { return static_cast<int>(existing_rows(length[image], rows)); }
    // Called by all lanes.
    __device__ int64_t start(int image) const {
        return rows_apart > 0 ? int64_t{image} * rows_apart : rows_before(length, image);
    }
    __device__ static int every_second(int first, int end) { return end > first ? (end - first + 1) / 2 : 0; }
    __device__ int a_count(int image) const { return every_second(a0, end(image)); }
    __device__ int b_count(int image) const { return every_second(b0, end(image)); }
};

// ---- tensor cores ---------------------------------------------------------------------------------------------------

// What tiles of A rows of set A by B rows of set B have in common: STAGES steps of the depth are on their way or in
// use.
template <int A_, int B_, int THREADS_, int STAGES_, int BLOCKS_>
struct TensorTile {
    static constexpr int A = A_, B = B_, THREADS = THREADS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int DEPTH = 64, CHUNKS = DEPTH / 8;  // 16-bit values, 16-byte chunks
    static constexpr int STAGE_BYTES = (A + B) * DEPTH * 2, ALIGNMENT = 1024;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + (A + B) * static_cast<int>(sizeof(float)) + ALIGNMENT;
    static constexpr int COPY_ROWS = THREADS / CHUNKS;  // rows that the threads copy at once
    static constexpr int COPIES_A = A / COPY_ROWS, COPIES = (A + B) / COPY_ROWS;
    static_assert(COPIES_A * COPY_ROWS == A && COPIES * COPY_ROWS == A + B, "threads copy A, then B");
    static_assert(COPY_ROWS % 8 == 0 && STAGE_BYTES % ALIGNMENT == 0, "a thread copies rows that are swizzled alike");
};

// WARPS_M x WARPS_N warps, each with its share of the tile in both directions.
template <int SIDE, int WARPS_M_, int WARPS_N_, int STAGES, int BLOCKS>
struct WarpTile : TensorTile<SIDE, SIDE, WARPS_M_ * WARPS_N_ * kWarp, STAGES, BLOCKS> {
    static constexpr bool GROUPS = false;
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, AHEAD = STAGES - 1;
    static constexpr int ROWS_M = SIDE / WARPS_M / 16, COLUMNS_N = SIDE / WARPS_N / 8;  // mma tiles of a warp
    static_assert(WARPS_M * ROWS_M * 16 == SIDE && WARPS_N * COLUMNS_N * 8 == SIDE, "warps cover the tile");
};

// Groups of four warps, each with 64 rows of A and all of B. A step is overwritten while the next is multiplied.
template <int WARPGROUPS, int B, int STAGES, int BLOCKS>
struct WarpgroupTile : TensorTile<64 * WARPGROUPS, B, WARPGROUPS * kWarpgroup, STAGES, BLOCKS> {
    static constexpr bool GROUPS = true;
    static constexpr int WARPS_M = 4 * WARPGROUPS, WARPS_N = 1, AHEAD = STAGES - 2;
    static constexpr int ROWS_M = 1, COLUMNS_N = B / 8;
};

// The best match of each row of a tile of set A within a tile of set B. All kernels of a GPU add up the products of two
// rows in the same order, whatever the tile, so they give the same bits.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    tensor_match_kernel(Sets sets, const T *tokens, Match *partial, RowCount count) {
    extern __shared__ unsigned char unaligned[];
    if (Tile::GROUPS && !ALGM_WARPGROUPS) return;
    unsigned char *shared = unaligned + (Tile::ALIGNMENT - __cvta_generic_to_shared(unaligned) % Tile::ALIGNMENT);
    float *scales = reinterpret_cast<float *>(shared + Tile::STAGES * Tile::STAGE_BYTES);
    const int image = blockIdx.z, first_a = blockIdx.y * Tile::A, first_b = blockIdx.x * Tile::B;
    const int a_count = sets.a_count(image), b_count = sets.b_count(image);
    let_next_start();
    if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0) count.clear();
    if (first_a >= a_count) return;
    tokens += sets.start(image) * sets.width;

    // Tile rows 0..A-1 are A, the others B; 16-byte chunks are swizzled by row so that no access meets a bank twice.
    const auto chunk_of = [&](int stage, int row, int chunk) {
        return shared + stage * Tile::STAGE_BYTES + (row * Tile::CHUNKS + (chunk ^ (row & 7))) * 16;
    };
    const int steps = first_b < b_count ? (sets.width + Tile::DEPTH - 1) / Tile::DEPTH : 0;
    // A thread always copies the same chunk of the same rows, COPY_ROWS apart, and adds up the squares of its values.
    const int my_row = threadIdx.x / Tile::CHUNKS, my_chunk = threadIdx.x % Tile::CHUNKS;
    const T *from_a = tokens + int64_t{sets.a0 + 2 * (first_a + my_row)} * sets.width + my_chunk * 8;
    const T *from_b = tokens + int64_t{sets.b0 + 2 * (first_b + my_row)} * sets.width + my_chunk * 8;
    const int64_t row_step = int64_t{2 * Tile::COPY_ROWS} * sets.width;
    const auto my_copy = [&](int stage, int i) {
        return chunk_of(stage, my_row, my_chunk) + i * Tile::COPY_ROWS * Tile::CHUNKS * 16;
    };
    const auto fetch = [&](int step) {
        if (step < steps) {
            const bool inside = step * Tile::DEPTH + my_chunk * 8 < sets.width;
#pragma unroll
            for (int i = 0; i < Tile::COPIES; ++i) {
                const bool is_a = i < Tile::COPIES_A;
                const int nth = is_a ? i : i - Tile::COPIES_A, row = my_row + nth * Tile::COPY_ROWS;
                const bool valid = inside && (is_a ? first_a + row < a_count : first_b + row < b_count);
                const T *from = (is_a ? from_a : from_b) + nth * row_step + step * Tile::DEPTH;
                copy_16(my_copy(step % Tile::STAGES, i), valid ? from : tokens, valid);
            }
        }
        end_copy_group();
    };
    float squares[Tile::COPIES] = {};
    const auto add_squares = [&](int stage) {
#pragma unroll
        for (int i = 0; i < Tile::COPIES; ++i) {
            const uint4 chunk = *reinterpret_cast<const uint4 *>(my_copy(stage, i));
            for (const unsigned pair : {chunk.x, chunk.y, chunk.z, chunk.w}) {
                const float2 values = to_floats(pair, T{});
                squares[i] = fmaf(values.x, values.x, squares[i]);
                squares[i] = fmaf(values.y, values.y, squares[i]);
            }
        }
    };

    const int lane = lane_index(), warp_m = warp_index() / Tile::WARPS_N, warp_n = warp_index() % Tile::WARPS_N;
    float sums[Tile::ROWS_M][Tile::COLUMNS_N][4] = {};
    const auto multiply_by_warps = [&](int stage) {
#pragma unroll
        for (int half = 0; half < Tile::DEPTH / 32; ++half) {
            unsigned b[Tile::COLUMNS_N][4];
#pragma unroll
            for (int n = 0; n < Tile::COLUMNS_N; ++n)
                load_matrices(b[n], chunk_of(stage, Tile::A + (warp_n * Tile::COLUMNS_N + n) * 8 + lane % 8,
                                             4 * half + lane / 8));
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                unsigned a[Tile::ROWS_M][4];
#pragma unroll
                for (int m = 0; m < Tile::ROWS_M; ++m)
                    load_matrices(a[m], chunk_of(stage, (warp_m * Tile::ROWS_M + m) * 16 + lane % 16,
                                                 4 * half + 2 * k + lane / 16));
#pragma unroll
                for (int m = 0; m < Tile::ROWS_M; ++m)
#pragma unroll
                    for (int n = 0; n < Tile::COLUMNS_N; ++n)
                        multiply(sums[m][n], a[m], b[n][2 * k], b[n][2 * k + 1], T{});
            }
        }
    };
    const auto multiply_by_groups = [&](int stage) {
        if constexpr (Tile::GROUPS) {
            const int group_row = warp_index() / 4 * 64;
            if (first_a + group_row >= a_count) return;
            const uint64_t a = descriptor_of(chunk_of(stage, group_row, 0));
            const uint64_t b = descriptor_of(chunk_of(stage, Tile::A, 0));
            start_products();
#pragma unroll
            for (int k = 0; k < Tile::DEPTH / 16; ++k)  // descriptors count 16 bytes, the size of a chunk
                multiply_group<T>(sums[0], a + 2 * k, b + 2 * k, Constant<Tile::B>{});
            end_product_group();
        }
    };
    for (int step = 0; step < Tile::AHEAD; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        wait_copies<Tile::AHEAD - 1>();
        if constexpr (Tile::GROUPS) {
            publish_copies();
            wait_products<1>();
        }
        __syncthreads();
        fetch(step + Tile::AHEAD);
        if constexpr (Tile::GROUPS)
            multiply_by_groups(step % Tile::STAGES);
        else
            multiply_by_warps(step % Tile::STAGES);
        add_squares(step % Tile::STAGES);
    }
    if constexpr (Tile::GROUPS) wait_products<0>();
#pragma unroll
    for (int i = 0; i < Tile::COPIES; ++i) {
        for (int offset = 1; offset < Tile::CHUNKS; offset *= 2)
            squares[i] += __shfl_xor_sync(kAllLanes, squares[i], offset);
        if (my_chunk == 0) scales[i * Tile::COPY_ROWS + my_row] = inverse_norm(squares[i]);
    }
    __syncthreads();  // scales are written, and the stages are free

    static_assert(Tile::A * Tile::WARPS_N * sizeof(Match) <= Tile::STAGE_BYTES, "a stage holds the last reduction");
    Match *warp_best = reinterpret_cast<Match *>(shared);  // (WARPS_N, A)
#pragma unroll
    for (int m = 0; m < Tile::ROWS_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = (warp_m * Tile::ROWS_M + m) * 16 + half * 8 + lane / 4;
            Match best = no_match();
#pragma unroll
            for (int n = 0; n < Tile::COLUMNS_N; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {  // columns ascend
                    const int column = (warp_n * Tile::COLUMNS_N + n) * 8 + lane % 4 * 2 + c;
                    const float cosine = sums[m][n][half * 2 + c] * scales[row] * scales[Tile::A + column];
                    if (cosine > best.similarity && first_b + column < b_count) best = {cosine, first_b + column};
                }
            best = best_of_lanes(best, 4);
            if (lane % 4 == 0) warp_best[warp_n * Tile::A + row] = best;
        }
    __syncthreads();
    for (int row = threadIdx.x; row < Tile::A && first_a + row < a_count; row += Tile::THREADS) {
        Match best = warp_best[row];
        for (int n = 1; n < Tile::WARPS_N; ++n) {
            const Match other = warp_best[n * Tile::A + row];
            best.take(other.similarity, other.column);
        }
        partial[(int64_t{image} * sets.a_max + first_a + row) * sets.tiles + blockIdx.x] = best;
    }
}

// ---- fp32 multiply-adds ---------------------------------------------------------------------------------------------

// SIDE rows of A against SIDE of B, 16 values deep; a thread forms EACH x EACH products. Every tile adds them up in the
// same order.
template <int SIDE_, int BLOCKS_>
struct PlainTile {
    static constexpr int SIDE = SIDE_, A = SIDE, B = SIDE, BLOCKS = BLOCKS_, DEPTH = 16, THREADS = 256, PAD = 4,
                         EACH = SIDE / 16;
    static constexpr int LOADS = 2 * SIDE / 64;  // rows of a thread: four threads load a row
    static_assert(SIDE % 32 == 0, "a thread's rows are read in fours and, at the end, a pair");

    // Row of a thread's i-th product: fours that lie 64 apart, then a pair.
    __device__ static int row_of(int thread, int i) {
        constexpr int kFours = EACH / 4 * 4;
        return i < kFours ? i / 4 * 64 + thread * 4 + i % 4 : kFours * 16 + thread * 2 + i - kFours;
    }

    __device__ static void read(const float *rows, int thread, float (&values)[EACH]) {
#pragma unroll
        for (int i = 0; i + 4 <= EACH; i += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(rows + row_of(thread, i));
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
        if (EACH % 4 != 0) {
            const float2 pair = *reinterpret_cast<const float2 *>(rows + row_of(thread, EACH - 2));
            values[EACH - 2] = pair.x, values[EACH - 1] = pair.y;
        }
    }
};

template <class T, int V>
__device__ void load_four(const T *row, int column, int width, bool valid, float (&values)[4]) {
    static_assert(V == 1 || V % 4 == 0, "a pack is read whole or value by value");
    if (V > 1 && valid && column < width) {  // width is a multiple of V, so four values are there
        const Pack<T, 4> pack = *reinterpret_cast<const Pack<T, 4> *>(row + column);
#pragma unroll
        for (int v = 0; v < 4; ++v) values[v] = to_float(pack.value[v]);
    } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) values[v] = valid && column + v < width ? to_float(row[column + v]) : 0.0f;
    }
}

template <class T, int V, class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    plain_match_kernel(Sets sets, const T *tokens, Match *partial, RowCount count) {
    __shared__ __align__(16) float rows[2][Tile::DEPTH][2 * Tile::SIDE + Tile::PAD];  // those of A, then those of B
    __shared__ float scales[2 * Tile::SIDE];
    const int image = blockIdx.z, first_a = blockIdx.y * Tile::SIDE, first_b = blockIdx.x * Tile::SIDE;
    const int a_count = sets.a_count(image), b_count = sets.b_count(image);
    let_next_start();
    if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0) count.clear();
    if (first_a >= a_count) return;
    tokens += sets.start(image) * sets.width;

    const int load_row = threadIdx.x / 4, load_column = threadIdx.x % 4 * 4;
    const T *from[Tile::LOADS];
    bool valid[Tile::LOADS];
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
        const int row = i * 64 + load_row;
        const bool is_a = row < Tile::SIDE;
        const int in_set = is_a ? first_a + row : first_b + row - Tile::SIDE;
        valid[i] = in_set < (is_a ? a_count : b_count);
        from[i] = tokens + (valid[i] ? int64_t{(is_a ? sets.a0 : sets.b0) + 2 * in_set} * sets.width : 0);
    }
    float next[Tile::LOADS][4], squares[Tile::LOADS] = {};
    const auto fetch = [&](int start) {
#pragma unroll
        for (int i = 0; i < Tile::LOADS; ++i)
            load_four<T, V>(from[i], start + load_column, sets.width, valid[i], next[i]);
    };
    const auto store = [&](int stage) {
#pragma unroll
        for (int i = 0; i < Tile::LOADS; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                rows[stage][load_column + v][i * 64 + load_row] = next[i][v];
                squares[i] = fmaf(next[i][v], next[i][v], squares[i]);
            }
    };

    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sums[Tile::EACH][Tile::EACH] = {};
    fetch(0);
    store(0);
    __syncthreads();
    for (int start = 0, stage = 0; start < sets.width; start += Tile::DEPTH, stage ^= 1) {
        const bool more = start + Tile::DEPTH < sets.width;
        if (more) fetch(start + Tile::DEPTH);
#pragma unroll
        for (int k = 0; k < Tile::DEPTH; ++k) {
            float a[Tile::EACH], b[Tile::EACH];
            Tile::read(rows[stage][k], ty, a);
            Tile::read(rows[stage][k] + Tile::SIDE, tx, b);
#pragma unroll
            for (int i = 0; i < Tile::EACH; ++i)
#pragma unroll
                for (int j = 0; j < Tile::EACH; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
        if (more) store(stage ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
        for (int offset = 1; offset < 4; offset *= 2) squares[i] += __shfl_xor_sync(kAllLanes, squares[i], offset);
        if (threadIdx.x % 4 == 0) scales[i * 64 + load_row] = inverse_norm(squares[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Tile::EACH; ++i) {
        const int row = Tile::row_of(ty, i);
        Match best = no_match();
#pragma unroll
        for (int j = 0; j < Tile::EACH; ++j) {  // columns ascend
            const int column = Tile::row_of(tx, j);
            const float cosine = sums[i][j] * scales[row] * scales[Tile::SIDE + column];
            if (cosine > best.similarity && first_b + column < b_count) best = {cosine, first_b + column};
        }
        best = best_of_lanes(best, 16);
        if (tx == 0 && first_a + row < a_count)
            partial[(int64_t{image} * sets.a_max + first_a + row) * sets.tiles + blockIdx.x] = best;
    }
}

}  // namespace algm::cuda

// The best match in set B for every row of set A: a tiled matrix product whose tiles are reduced to one maximum a row
// before they leave the chip. One kernel for tensor cores (16-bit tokens), one with fp32 multiply-adds for the rest.
#pragma once

#include "device.cuh"

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
    int rows, width, a0, b0, a_max, tiles;
    const int64_t *length;

    __device__ int end(int image) const { return static_cast<int>(min(length[image], int64_t{rows})); }
    __device__ static int every_second(int first, int end) { return end > first ? (end - first + 1) / 2 : 0; }
    __device__ int a_count(int image) const { return every_second(a0, end(image)); }
    __device__ int b_count(int image) const { return every_second(b0, end(image)); }
};

__device__ inline float inverse_norm(float squares) { return 1.0f / fmaxf(sqrtf(squares), kNormEps); }

// ---- tensor cores ---------------------------------------------------------------------------------------------------

// c += a b for a 16x16 and a 16x8 tile; fp32 sums. sm_75 has the fp16 instruction at half the depth and none for bf16.
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// 16 bytes from device to shared memory, zeros where `valid` is false; asynchronous from sm_80 on.
__device__ inline void copy_16(void *to, const void *from, bool valid) {
#if __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
#else
    *static_cast<uint4 *>(to) = valid ? *static_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
#endif
}

__device__ inline void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

template <int Pending>
__device__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending));
#endif
}

__device__ inline void load_matrices(unsigned (&r)[4], const void *row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// A block multiplies SIDE rows of A with SIDE rows of B; WARPS_M x WARPS_N warps share the tile, STAGES steps of the
// depth are on their way or in use.
template <int SIDE_, int WARPS_M_, int WARPS_N_, int STAGES_>
struct TensorTile {
    static constexpr int SIDE = SIDE_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_;
    static constexpr int THREADS = WARPS_M * WARPS_N * kWarp;
    static constexpr int ROWS_M = SIDE / WARPS_M / 16, COLUMNS_N = SIDE / WARPS_N / 8;  // mma tiles of a warp
    static constexpr int DEPTH = 64, CHUNKS = DEPTH / 8, STAGES = STAGES_;              // 16-bit values, 16-byte chunks
    static constexpr int STAGE_BYTES = 2 * SIDE * DEPTH * 2;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 2 * SIDE * static_cast<int>(sizeof(float));
    static_assert(THREADS == 2 * SIDE && CHUNKS == 8, "a thread copies rows that are SIDE / 4 apart");
    static_assert(ROWS_M % WARPS_N == 0 && COLUMNS_N / 2 % WARPS_M == 0, "warps share the norms of their rows evenly");
    static_assert(SIDE * WARPS_N * sizeof(Match) <= STAGE_BYTES, "the stages are reused for the last reduction");
};
using WideTile = TensorTile<64, 2, 2, 3>;
using NarrowTile = TensorTile<32, 1, 2, 6>;

// Squared norms of sixteen rows, from the diagonal of their product with themselves: what the registers hold as rows of
// a product they also hold as its columns. Two of the four sums a lane gets lie on the diagonal in half of the lanes.
struct SquaredNorms {
    float upper[4] = {}, lower[4] = {};  // products of rows 0-7 and of rows 8-15

    template <class T>
    __device__ void add(const unsigned (&rows)[4], T type) {
        multiply(upper, rows, rows[0], rows[2], type);
        multiply(lower, rows, rows[1], rows[3], type);
    }

    // Writes the inverse norms of the rows to scale[0..15].
    __device__ void write(float *scale) const {
        const int row = lane_index() / 4, column = lane_index() % 4 * 2;
        if (row == column || row == column + 1) {
            scale[row] = inverse_norm(row == column ? upper[0] : upper[1]);
            scale[row + 8] = inverse_norm(row == column ? lower[2] : lower[3]);
        }
    }
};

// One of N register groups, chosen without indexing registers at run time.
template <int N>
__device__ void pick(unsigned (&out)[4], const unsigned (&groups)[N][4], int which) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        out[r] = groups[0][r];
#pragma unroll
        for (int n = 1; n < N; ++n) out[r] = which == n ? groups[n][r] : out[r];
    }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::THREADS, 2)
    tensor_match_kernel(Sets sets, const T *tokens, Match *partial, RowCount count) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *scales = reinterpret_cast<float *>(shared + Tile::STAGES * Tile::STAGE_BYTES);
    const int image = blockIdx.z, first_a = blockIdx.y * Tile::SIDE, first_b = blockIdx.x * Tile::SIDE;
    const int a_count = sets.a_count(image), b_count = sets.b_count(image);
    if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0) count.clear();
    if (first_a >= a_count) return;
    tokens += int64_t{image} * sets.rows * sets.width;

    // Tile rows 0..SIDE-1 are A, the others B; 16-byte chunks are swizzled by row so that no access meets a bank twice.
    const auto chunk_of = [&](int stage, int row, int chunk) {
        return shared + stage * Tile::STAGE_BYTES + (row * Tile::CHUNKS + (chunk ^ (row & 7))) * 16;
    };
    const int steps = (sets.width + Tile::DEPTH - 1) / Tile::DEPTH;
    // A thread always copies the same chunk of the same rows: SIDE / 4 apart, first those of A, then those of B.
    const int my_row = threadIdx.x / Tile::CHUNKS, my_chunk = threadIdx.x % Tile::CHUNKS;
    const T *from_a = tokens + int64_t{sets.a0 + 2 * (first_a + my_row)} * sets.width + my_chunk * 8;
    const T *from_b = tokens + int64_t{sets.b0 + 2 * (first_b + my_row)} * sets.width + my_chunk * 8;
    const int64_t row_step = int64_t{Tile::SIDE / 2} * sets.width;
    const auto fetch = [&](int step) {
        if (step < steps) {
            const bool inside = step * Tile::DEPTH + my_chunk * 8 < sets.width;
#pragma unroll
            for (int i = 0; i < Tile::CHUNKS; ++i) {
                const bool is_a = i < Tile::CHUNKS / 2;
                const int nth = i % (Tile::CHUNKS / 2), row = my_row + nth * (Tile::SIDE / 4);
                const bool valid = inside && (is_a ? first_a + row < a_count : first_b + row < b_count);
                const T *from = (is_a ? from_a : from_b) + nth * row_step + step * Tile::DEPTH;
                copy_16(chunk_of(step % Tile::STAGES, is_a ? row : Tile::SIDE + row, my_chunk), valid ? from : tokens,
                        valid);
            }
        }
        end_copy_group();
    };

    const int lane = lane_index(), warp_m = warp_index() / Tile::WARPS_N, warp_n = warp_index() % Tile::WARPS_N;
    float sums[Tile::ROWS_M][Tile::COLUMNS_N][4] = {};
    constexpr int kNormsA = Tile::ROWS_M / Tile::WARPS_N, kNormsB = Tile::COLUMNS_N / 2 / Tile::WARPS_M;
    SquaredNorms norms_a[kNormsA], norms_b[kNormsB];
    for (int step = 0; step < Tile::STAGES - 1; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        wait_copies<Tile::STAGES - 2>();
        __syncthreads();
        fetch(step + Tile::STAGES - 1);
        const int stage = step % Tile::STAGES;
#pragma unroll
        for (int k = 0; k < Tile::DEPTH / 16; ++k) {
            unsigned a[Tile::ROWS_M][4], b[Tile::COLUMNS_N / 2][4];
#pragma unroll
            for (int m = 0; m < Tile::ROWS_M; ++m)
                load_matrices(a[m], chunk_of(stage, (warp_m * Tile::ROWS_M + m) * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int n = 0; n < Tile::COLUMNS_N / 2; ++n)
                load_matrices(
                    b[n],
                    chunk_of(stage, Tile::SIDE + (warp_n * Tile::COLUMNS_N / 2 + n) * 16 + lane / 16 * 8 + lane % 8,
                             2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < Tile::ROWS_M; ++m)
#pragma unroll
                for (int n = 0; n < Tile::COLUMNS_N; ++n)
                    multiply(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], T{});
            // Warps that hold the same rows take turns at the norms.
#pragma unroll
            for (int m = 0; m < kNormsA; ++m) {
                unsigned own[4];
                pick(own, a, warp_n * kNormsA + m);
                norms_a[m].add(own, T{});
            }
#pragma unroll
            for (int n = 0; n < kNormsB; ++n) {
                unsigned own[4];
                pick(own, b, warp_m * kNormsB + n);
                const unsigned as_rows[4] = {own[0], own[2], own[1], own[3]};
                norms_b[n].add(as_rows, T{});
            }
        }
    }
    for (int m = 0; m < kNormsA; ++m) norms_a[m].write(scales + (warp_m * Tile::ROWS_M + warp_n * kNormsA + m) * 16);
    for (int n = 0; n < kNormsB; ++n)
        norms_b[n].write(scales + Tile::SIDE + (warp_n * Tile::COLUMNS_N / 2 + warp_m * kNormsB + n) * 16);
    __syncthreads();  // scales are written, and the stages are free

    Match *warp_best = reinterpret_cast<Match *>(shared);  // (WARPS_N, SIDE)
#pragma unroll
    for (int m = 0; m < Tile::ROWS_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = (warp_m * Tile::ROWS_M + m) * 16 + half * 8 + lane / 4;
            Match best = no_match();
#pragma unroll
            for (int n = 0; n < Tile::COLUMNS_N; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int column = (warp_n * Tile::COLUMNS_N + n) * 8 + lane % 4 * 2 + c;
                    const float cosine = sums[m][n][half * 2 + c] * scales[row] * scales[Tile::SIDE + column];
                    if (first_b + column < b_count) best.take(cosine, first_b + column);
                }
            best = best_of_lanes(best, 4);
            if (lane % 4 == 0) warp_best[warp_n * Tile::SIDE + row] = best;
        }
    __syncthreads();
    if (threadIdx.x < Tile::SIDE && first_a + threadIdx.x < a_count) {
        Match best = warp_best[threadIdx.x];
        for (int n = 1; n < Tile::WARPS_N; ++n) {
            const Match other = warp_best[n * Tile::SIDE + threadIdx.x];
            best.take(other.similarity, other.column);
        }
        partial[(int64_t{image} * sets.a_max + first_a + threadIdx.x) * sets.tiles + blockIdx.x] = best;
    }
}

// ---- fp32 multiply-adds ---------------------------------------------------------------------------------------------

// 128 rows of A against 64 of B, 16 values deep; a thread forms 8 x 4 products.
struct PlainTile {
    static constexpr int A = 128, B = 64, DEPTH = 16, THREADS = 256, PAD = 4;
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

template <class T, int V>
__global__ void __launch_bounds__(PlainTile::THREADS)
    plain_match_kernel(Sets sets, const T *tokens, Match *partial, RowCount count) {
    using Tile = PlainTile;
    __shared__ __align__(16) float left[2][Tile::DEPTH][Tile::A + Tile::PAD],
        right[2][Tile::DEPTH][Tile::B + Tile::PAD];
    __shared__ float scales[Tile::A + Tile::B];
    const int image = blockIdx.z, first_a = blockIdx.y * Tile::A, first_b = blockIdx.x * Tile::B;
    const int a_count = sets.a_count(image), b_count = sets.b_count(image);
    if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0) count.clear();
    if (first_a >= a_count) return;
    tokens += int64_t{image} * sets.rows * sets.width;

    // Four threads load a row, four values each: two rows of A and one of B a thread.
    const int load_row = threadIdx.x / 4, load_column = threadIdx.x % 4 * 4;
    const T *rows[3];
    bool valid[3];
    for (int i = 0; i < 3; ++i) {
        const int in_set = i < 2 ? first_a + i * 64 + load_row : first_b + load_row;
        valid[i] = in_set < (i < 2 ? a_count : b_count);
        rows[i] = tokens + (valid[i] ? int64_t{(i < 2 ? sets.a0 : sets.b0) + 2 * in_set} * sets.width : 0);
    }
    float next[3][4], squares[3] = {};
    const auto fetch = [&](int start) {
#pragma unroll
        for (int i = 0; i < 3; ++i) load_four<T, V>(rows[i], start + load_column, sets.width, valid[i], next[i]);
    };
    const auto store = [&](int stage) {
#pragma unroll
        for (int i = 0; i < 3; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                float *row = i < 2 ? &left[stage][load_column + v][i * 64] : right[stage][load_column + v];
                row[load_row] = next[i][v];
                squares[i] = fmaf(next[i][v], next[i][v], squares[i]);
            }
    };

    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sums[8][4] = {};
    fetch(0);
    store(0);
    __syncthreads();
    for (int start = 0, stage = 0; start < sets.width; start += Tile::DEPTH, stage ^= 1) {
        const bool more = start + Tile::DEPTH < sets.width;
        if (more) fetch(start + Tile::DEPTH);
#pragma unroll
        for (int k = 0; k < Tile::DEPTH; ++k) {
            const float4 a0 = *reinterpret_cast<const float4 *>(&left[stage][k][ty * 4]);
            const float4 a1 = *reinterpret_cast<const float4 *>(&left[stage][k][64 + ty * 4]);
            const float4 b = *reinterpret_cast<const float4 *>(&right[stage][k][tx * 4]);
            const float a_values[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w},
                        b_values[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a_values[i], b_values[j], sums[i][j]);
        }
        if (more) store(stage ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        for (int offset = 1; offset < 4; offset *= 2) squares[i] += __shfl_xor_sync(kAllLanes, squares[i], offset);
        if (threadIdx.x % 4 == 0) scales[i * 64 + load_row] = inverse_norm(squares[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int row = i / 4 * 64 + ty * 4 + i % 4;
        Match best = no_match();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = tx * 4 + j;
            const float cosine = sums[i][j] * scales[row] * scales[Tile::A + column];
            if (first_b + column < b_count) best.take(cosine, first_b + column);
        }
        best = best_of_lanes(best, 16);
        if (tx == 0 && first_a + row < a_count)
            partial[(int64_t{image} * sets.a_max + first_a + row) * sets.tiles + blockIdx.x] = best;
    }
}

}  // namespace algm::cuda

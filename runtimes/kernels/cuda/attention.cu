// Attention over the product of a linear layer with tokens: softmax(q k^T) v a head, online, rows read where they lie.
#include "tensor.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kTile = 64;  // queries of a block, and keys of a step

// Rows of one image: where they start among all, how many exist, and how many of the result are written.
struct Image {
    int start, count, written;
};

// The images of a product.
struct Images {
    const int64_t *length;  // may be null: all rows exist
    int images, rows;
    bool ragged;

    // Tiles of `queries` rows that hold them all: ragged images may each have one that is not full.
    int64_t tiles(int queries) const {
        return ragged ? ragged_tiles(images, int64_t{images} * rows, queries) : images * ceil_div(rows, queries);
    }
};

// The image of a tile of `queries` rows and the tile's place in it. Called by all lanes.
__device__ inline Image image_of(const Images &all, int tile, int queries, int &first) {
    if (all.ragged) {
        const RaggedTile one = ragged_tile(all.length, all.images, 0, tile, queries);
        first = one.first;
        const int left = max(all.images * all.rows - one.start, 0), count = min(one.count, left);
        return {one.start, count, one.image < all.images ? count : left};
    }
    const int each = (all.rows + queries - 1) / queries, image = tile / each;
    first = tile % each * queries;
    const int64_t length = all.length == nullptr ? all.rows : all.length[image];
    return {image * all.rows, static_cast<int>(existing_rows(length, all.rows)), all.rows};
}

// ---- tensor cores, heads of 64 16-bit values ------------------------------------------------------------------------

constexpr int kSide = 64, kChunks = kSide / 8, kStages = 3, kTileBytes = kTile * kSide * 2;
constexpr float kFar = 8;  // powers of two that a weight may exceed one by: no 16-bit type comes near its limits

// c += a b of a 64x16 tile in registers and a 16x64 tile in shared memory, by four warps; FRESH: what c held does not
// count. TRANSPOSED: the rows in shared memory are the 16, not the 64.
#define ALGM_REGISTER_PRODUCT(type, adds, transposed, sums)                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                 \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                  \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, " \
                 adds ", 1, 1, " transposed ";"                                                              \
                 : sums(0), sums(4)                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define ALGM_FRESH_4(n) "=f"(c[n][0]), "=f"(c[n][1]), "=f"(c[n][2]), "=f"(c[n][3])
#define ALGM_FRESH_16(n) ALGM_FRESH_4(n), ALGM_FRESH_4(n + 1), ALGM_FRESH_4(n + 2), ALGM_FRESH_4(n + 3)
#define ALGM_MULTIPLY_REGISTERS(type)                               \
    if constexpr (TRANSPOSED)                                       \
        ALGM_REGISTER_PRODUCT(type, "1", "1", ALGM_SUMS_16);        \
    else if constexpr (FRESH)                                       \
        ALGM_REGISTER_PRODUCT(type, "0", "0", ALGM_FRESH_16);       \
    else                                                            \
        ALGM_REGISTER_PRODUCT(type, "1", "0", ALGM_SUMS_16)
template <class T, bool FRESH, bool TRANSPOSED>
__device__ void multiply_registers(float (&c)[8][4], const unsigned (&a)[4], uint64_t b) {
#if ALGM_WARPGROUPS
    if constexpr (std::is_same_v<T, __half>) {
        ALGM_MULTIPLY_REGISTERS("f16");
    } else {
        ALGM_MULTIPLY_REGISTERS("bf16");
    }
#endif
}

__device__ inline void load_transposed_matrices(unsigned (&r)[4], const void *row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ inline float exp2_of(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

__device__ inline unsigned pair_of(float low, float high, __half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}
__device__ inline unsigned pair_of(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <class T>
__device__ unsigned &pair_at(T *values) {
    return *reinterpret_cast<unsigned *>(values);
}
template <class T>
__device__ unsigned pair_at(const T *values) {
    return *reinterpret_cast<const unsigned *>(values);
}

// Two neighbouring values of a bias that may be missing.
__device__ inline float2 shift_of(const float *bias, int at) {
    return bias ? *reinterpret_cast<const float2 *>(bias + at) : make_float2(0.0f, 0.0f);
}

// A tile in shared memory: rows of 128 bytes, 16-byte chunks swizzled by row.
__device__ inline unsigned char *chunk_of(unsigned char *tile, int row, int chunk) {
    return tile + (row * kChunks + (chunk ^ (row & 7))) * 16;
}

// Grid: tiles of queries, heads; four warps share keys and values and have 16 queries each. ASYNC: they multiply as a
// group, as code for sm_90a can. `scale` has the logarithm's base two in it. A bias of the keys would change no softmax.
template <class T, bool ASYNC>
__global__ void __launch_bounds__(kWarpgroup, ASYNC ? 4 : 3)
    tensor_attention_kernel(Images images, const T *product, const float *bias, float scale, T *out) {
    __shared__ __align__(1024) unsigned char shared[kStages][2][kTileBytes];
    if (ASYNC && !ALGM_WARPGROUPS) return;
    int first;
    const Image image = image_of(images, blockIdx.x, kTile, first);
    if (first >= image.written) return;
    const int width = gridDim.y * kSide, stride = 3 * width, head = blockIdx.y * kSide, lane = lane_index();
    const T *rows = product + int64_t{image.start} * stride + head;
    T *results = out + int64_t{image.start} * width + head;

    // The first query of this thread; the second lies eight further.
    const int query = first + warp_index() * 16 + lane / 4, column = lane % 4 * 2;
    const int steps = first < image.count ? (image.count + kTile - 1) / kTile : 0;

    constexpr int kCopyRows = kWarpgroup / kChunks;  // rows that the threads copy at once
    static_assert(kCopyRows % 8 == 0, "a thread copies rows that are swizzled alike");
    const int my_row = threadIdx.x / kChunks, my_chunk = threadIdx.x % kChunks;
    const T *next = rows + int64_t{my_row} * stride + width + my_chunk * 8;
    unsigned char *const my_copy = chunk_of(shared[0][0], my_row, my_chunk);
    const auto fetch = [&](int step) {
        if (step < steps) {
            unsigned char *to = my_copy + step % kStages * 2 * kTileBytes;
            const int left = image.count - step * kTile - my_row;
#pragma unroll
            for (int i = 0; i < kTile; i += kCopyRows) {
                const T *from = i < left ? next + i * stride : rows;
                copy_16(to + i * kSide * 2, from, i < left);
                copy_16(to + i * kSide * 2 + kTileBytes, i < left ? from + width : rows, i < left);
            }
            next += int64_t{kTile} * stride;
        }
        end_copy_group();
    };
    fetch(0);

    unsigned queries[kSide / 16][4];
#pragma unroll
    for (int k = 0; k < kSide / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = query + i % 2 * 8, at = k * 16 + i / 2 * 8 + column;
            queries[k][i] = 0;
            if (row < image.count) {
                const float2 value = to_floats(pair_at(rows + int64_t{row} * stride + at), T{});
                const float2 shift = shift_of(bias, head + at);
                queries[k][i] = pair_of(value.x + shift.x, value.y + shift.y, T{});
            }
        }

    float most[2] = {-INFINITY, -INFINITY}, total[2] = {}, mixed[kSide / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
        unsigned char *keys = shared[step % kStages][0], *values = keys + kTileBytes;
        wait_copies<0>();
        if constexpr (ASYNC) publish_copies();
        __syncthreads();
        fetch(step + 1);  // where no product reads: those of the last step may still run, those before have ended

        float score[kTile / 8][4];
        if constexpr (ASYNC) {
            start_products();
            multiply_registers<T, true, false>(score, queries[0], descriptor_of(keys));
#pragma unroll
            for (int k = 1; k < kSide / 16; ++k)
                multiply_registers<T, false, false>(score, queries[k], descriptor_of(keys + k * 32));
            end_product_group();
            wait_products<0>();
        } else {
#pragma unroll
            for (int n = 0; n < kTile / 8; n += 2) {
#pragma unroll
                for (int i = 0; i < 4; ++i) score[n][i] = score[n + 1][i] = 0;
#pragma unroll
                for (int k = 0; k < kSide / 16; ++k) {
                    unsigned b[4];
                    load_matrices(b, chunk_of(keys, n * 8 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
                    multiply(score[n], queries[k], b[0], b[1], T{});
                    multiply(score[n + 1], queries[k], b[2], b[3], T{});
                }
            }
        }
        if ((step + 1) * kTile > image.count) {
#pragma unroll
            for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (step * kTile + n * 8 + column + i % 2 >= image.count) score[n][i] = -INFINITY;
        }

        // Weights are relative to a number that follows the largest score from afar, so that sums rarely change theirs.
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = fmaxf(score[0][2 * half], score[0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < kTile / 8; ++n)
                largest[half] = fmaxf(largest[half], fmaxf(score[n][2 * half], score[n][2 * half + 1]));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], 1));
            largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], 2)) * scale;
        }
        const bool rises = largest[0] > most[0] + kFar || largest[1] > most[1] + kFar;
        if (__any_sync(kAllLanes, rises)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                largest[half] = fmaxf(most[half], largest[half]);
                const float fading = exp2_of(most[half] - largest[half]);
                most[half] = largest[half];
                total[half] *= fading;
#pragma unroll
                for (int n = 0; n < kSide / 8; ++n) mixed[n][2 * half] *= fading, mixed[n][2 * half + 1] *= fading;
            }
        }
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                score[n][i] = exp2_of(fmaf(score[n][i], scale, -most[i / 2]));
                total[i / 2] += score[n][i];
            }

        unsigned weights[kTile / 16][4];
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[k][i] = pair_of(score[2 * k + i / 2][i % 2 * 2], score[2 * k + i / 2][i % 2 * 2 + 1], T{});
        if constexpr (ASYNC) {
            start_products();
#pragma unroll
            for (int k = 0; k < kTile / 16; ++k)
                multiply_registers<T, false, true>(mixed, weights[k], descriptor_of(values + k * 16 * kSide * 2));
            end_product_group();
        } else {
#pragma unroll
            for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
                for (int n = 0; n < kSide / 8; n += 2) {
                    unsigned b[4];
                    load_transposed_matrices(b, chunk_of(values, k * 16 + lane % 16, n + lane / 16));
                    multiply(mixed[n], weights[k], b[0], b[1], T{});
                    multiply(mixed[n + 1], weights[k], b[2], b[3], T{});
                }
        }
    }
    if constexpr (ASYNC) wait_products<0>();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = query + half * 8;
        total[half] += __shfl_xor_sync(kAllLanes, total[half], 1);
        total[half] += __shfl_xor_sync(kAllLanes, total[half], 2);
        const bool exists = row < image.count;
        const float share = exists ? 1.0f / total[half] : 0.0f;
        if (row < image.written) {
#pragma unroll
            for (int n = 0; n < kSide / 8; ++n) {
                const float2 shift = shift_of(bias, 2 * width + head + n * 8 + column);
                const float low = exists ? fmaf(mixed[n][2 * half], share, shift.x) : 0.0f;
                const float high = exists ? fmaf(mixed[n][2 * half + 1], share, shift.y) : 0.0f;
                pair_at(results + int64_t{row} * width + n * 8 + column) = pair_of(low, high, T{});
            }
        }
    }
}

// ---- everything else ------------------------------------------------------------------------------------------------

constexpr int kPlainWarps = 4, kPlainValues = 4;  // values of a lane

// One warp: one query of a head, kWarp keys at a time and kWarp * kPlainValues values of the result.
template <class T>
__global__ void __launch_bounds__(kPlainWarps *kWarp)
    plain_attention_kernel(Images images, const T *product, const float *bias, int side, float scale, T *out) {
    int first;
    const Image image = image_of(images, blockIdx.x, kPlainWarps, first);
    const int width = gridDim.y * side, stride = 3 * width, head = blockIdx.y * side, lane = lane_index();
    const int query = first + warp_index();
    if (query >= image.written) return;
    const T *rows = product + int64_t{image.start} * stride + head;
    const auto shift = [&](int part, int at) { return bias ? bias[part * width + head + at] : 0.0f; };
    for (int from = 0; from < side; from += kWarp * kPlainValues) {
        float most = -INFINITY, total = 0, mixed[kPlainValues] = {};
        for (int step = 0; query < image.count && step < image.count; step += kWarp) {
            float score = -INFINITY;
            if (step + lane < image.count) {
                const T *key = rows + int64_t{step + lane} * stride + width;
                score = 0;
                for (int i = 0; i < side; ++i)
                    score = fmaf(to_float(rows[int64_t{query} * stride + i]) + shift(0, i), to_float(key[i]), score);
                score *= scale;
            }
            const float largest = fmaxf(most, warp_max(score));
            const float weight = exp2f(score - largest), fading = exp2f(most - largest);
            most = largest;
            total = fmaf(total, fading, warp_sum(weight));
#pragma unroll
            for (int v = 0; v < kPlainValues; ++v) mixed[v] *= fading;
            for (int key = 0; key < min(kWarp, image.count - step); ++key) {
                const float share = __shfl_sync(kAllLanes, weight, key);
                const T *value = rows + int64_t{step + key} * stride + 2 * width + from;
#pragma unroll
                for (int v = 0; v < kPlainValues; ++v)
                    if (from + v * kWarp + lane < side)
                        mixed[v] = fmaf(share, to_float(value[v * kWarp + lane]), mixed[v]);
            }
        }
#pragma unroll
        for (int v = 0; v < kPlainValues; ++v) {
            const int at = from + v * kWarp + lane;
            if (at >= side) continue;
            const float result = query < image.count ? mixed[v] / total + shift(2, at) : 0.0f;
            out[int64_t{image.start + query} * width + head + at] = from_float<T>(result);
        }
    }
}

// ---- launches -------------------------------------------------------------------------------------------------------

struct AttentionLaunch {
    const algm_attention_params &p;
    Images images;
    const void *product;
    const float *bias;
    void *out, *stream;

    template <class T, class... Arguments>
    int start_with(void (*kernel)(Images, const T *, const float *, Arguments...), int queries, int threads,
                   std::common_type_t<Arguments>... arguments) const {
        const int64_t tiles = images.tiles(queries);
        if (tiles > INT32_MAX) return ALGM_UNSUPPORTED;
        const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(p.heads));
        return start(kernel, {grid, static_cast<unsigned>(threads)}, stream, images, static_cast<const T *>(product),
                     bias, arguments...);
    }

    template <class T, bool ASYNC>
    int tensor() const {
        return start_with(tensor_attention_kernel<T, ASYNC>, kTile, kWarpgroup, scale(), static_cast<T *>(out));
    }

    template <class T>
    int plain() const {
        return start_with(plain_attention_kernel<T>, kPlainWarps, kPlainWarps * kWarp, static_cast<int>(p.side),
                          scale(), static_cast<T *>(out));
    }

    // The exponentials have the base two.
    float scale() const { return p.scale * 1.4426950408889634f; }

    template <class T>
    int with_type(bool warpgroups) const {
        return warpgroups ? tensor<T, true>() : tensor<T, false>();
    }
};

}  // namespace

int algm_cuda_attention(const algm_attention_params *params, const void *product, const float *bias,
                        const int64_t *length, void *out, void *stream) {
    if (const int status = check(params)) return status;
    const algm_attention_params &p = *params;
    if (any_null(product, out) || (p.ragged && length == nullptr)) return ALGM_INVALID_ARGUMENT;
    if (p.rows == 0) return ALGM_OK;
    if (p.heads > kMaxBlocksBeside) return ALGM_UNSUPPORTED;
    const Images images = {length, static_cast<int>(p.images), static_cast<int>(p.rows), p.ragged != 0};
    const AttentionLaunch launch = {p, images, product, bias, out, stream};
    const bool is_bf16 = p.dtype == ALGM_BFLOAT16;
    bool tensor = p.dtype != ALGM_FLOAT32 && p.side == kSide && p.scale > 0 && is_aligned(product) && is_aligned(out) &&
                  (bias == nullptr || is_aligned(bias));
    if (tensor)
        if (const int status =
                has_tensor_cores(tensor_attention_kernel<__nv_bfloat16, false>, is_bf16, &tensor))
            return status;
    if (tensor) {
        bool warpgroups = false;
        if (const int status = has_warpgroups(&warpgroups)) return status;
        return is_bf16 ? launch.with_type<__nv_bfloat16>(warpgroups) : launch.with_type<__half>(warpgroups);
    }
    switch (p.dtype) {
        case ALGM_FLOAT16: return launch.plain<__half>();
        case ALGM_BFLOAT16: return launch.plain<__nv_bfloat16>();
        default: return launch.plain<float>();
    }
}

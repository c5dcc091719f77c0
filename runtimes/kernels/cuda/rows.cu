// Rows of ragged images, moved.
#include "device.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kMoveWarps = 8, kMoveRows = 4;  // warps of a block, and rows that one holds at a time

// Calls run(word, words of a row) with the largest word that divides a row and both addresses.
template <class Run>
int with_word(int64_t width, int32_t dtype, const void *a, const void *b, Run run) {
    const int64_t bytes = width * dtype_bytes(dtype);
    const uint64_t odd =
        reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uint64_t>(bytes);
    const auto count = [&](auto word) { return static_cast<int>(bytes / static_cast<int64_t>(sizeof(word))); };
    if (odd % 16 == 0) return run(uint4{}, count(uint4{}));
    if (odd % 4 == 0) return run(uint32_t{}, count(uint32_t{}));
    return run(uint16_t{}, count(uint16_t{}));
}

// A warp writes neighbouring rows of the output; word_of(i, w) is a word of the i-th. All that a lane writes at once is
// read before.
template <class Word, class WordOf>
__device__ void move_rows(int words, int count, Word *out, WordOf word_of) {
    for (int w = lane_index(); w < words; w += kWarp) {
        Word held[kMoveRows];
#pragma unroll
        for (int i = 0; i < kMoveRows; ++i) held[i] = i < count ? word_of(i, w) : Word{};
#pragma unroll
        for (int i = 0; i < kMoveRows; ++i)
            if (i < count) out[int64_t{i} * words + w] = held[i];
    }
}

// Values in a word.
template <class T, class Word>
constexpr int kIn = sizeof(Word) / sizeof(T);

// A word of values that are rounded from fp32.
template <class T, class Word>
__device__ Word rounded(const float *from) {
    alignas(Word) T values[kIn<T, Word>];
#pragma unroll
    for (int i = 0; i < kIn<T, Word>; ++i) values[i] = from_float<T>(from[i]);
    return *reinterpret_cast<const Word *>(values);
}

struct Frame {
    int images, rows, skip, put;  // rows: of the array that each image has in the output
    const int64_t *length;
    const float *front;
};

template <class T, class Word>
__global__ void reframe_kernel(Frame frame, int words, const Word *values, Word *out) {
    const int more = frame.put - frame.skip, all = frame.images * frame.rows;
    const int tile = blockIdx.x * kMoveWarps + warp_index();
    const RaggedTile to = ragged_tile(frame.length, frame.images, more, tile, kMoveRows);
    const bool exists = to.image < frame.images;
    const int first = to.start + to.first;  // row of the output
    const int count = min(min(exists ? to.start + to.count : all, all) - first, kMoveRows);
    if (count <= 0) return;
    const int before = to.start - to.image * more + frame.skip;  // row of the values behind those that go
    move_rows(words, count, out + int64_t{first} * words, [&](int i, int w) {
        const int row = to.first + i;  // of the image
        if (!exists) return Word{};
        if (row < frame.put) return rounded<T, Word>(frame.front + (int64_t{row} * words + w) * kIn<T, Word>);
        return values[int64_t{before + row - frame.put} * words + w];
    });
}

// Grid: groups of rows of an image, images.
template <class Word>
__global__ void apart_kernel(const int64_t *length, int all, int begin, int count, int words, const Word *values,
                             Word *out) {
    const int first = (blockIdx.x * kMoveWarps + warp_index()) * kMoveRows, image = blockIdx.y;
    if (first >= count) return;
    const int start = rows_before(length, image), end = min(static_cast<int>(length[image]), all - start);
    move_rows(words, min(count - first, kMoveRows), out + (int64_t{image} * count + first) * words,
              [&](int i, int w) {
                  const int row = begin + first + i;
                  return row < end ? values[int64_t{start + row} * words + w] : Word{};
              });
}

}  // namespace

int algm_cuda_reframe(const algm_reframe_params *params, const void *values, const int64_t *length, const float *front,
                      void *out, void *stream) {
    if (const int status = check(params)) return status;
    const algm_reframe_params &p = *params;
    const int64_t rows = p.rows - p.skip + p.put;
    if (is_missing(values, p.rows) || length == nullptr || is_missing(front, p.put) || is_missing(out, rows))
        return ALGM_INVALID_ARGUMENT;
    if (rows == 0) return ALGM_OK;
    const Frame frame = {static_cast<int>(p.images), static_cast<int>(rows), static_cast<int>(p.skip),
                         static_cast<int>(p.put),    length,                 front};
    const int64_t tiles = ragged_tiles(p.images, p.images * rows, kMoveRows);
    const Blocks blocks = {dim3(static_cast<unsigned>(ceil_div(tiles, kMoveWarps))), kMoveWarps * kWarp};
    return with_word(p.width, p.dtype, values, out, [&](auto word, int words) {
        return with_dtype(p.dtype, 1, false, [&](auto type, auto) {
            using T = decltype(type);
            using Word = decltype(word);
            // fp32 at an address that is no multiple of four.
            if constexpr (sizeof(Word) < sizeof(T)) return ALGM_INVALID_ARGUMENT;
            else
                return start(reframe_kernel<T, Word>, blocks, stream, frame, words, static_cast<const Word *>(values),
                             static_cast<Word *>(out));
        });
    });
}

int algm_cuda_apart(const algm_apart_params *params, const void *values, const int64_t *length, void *out,
                    void *stream) {
    if (const int status = check(params)) return status;
    const algm_apart_params &p = *params;
    if (is_missing(values, p.rows) || length == nullptr || is_missing(out, p.count)) return ALGM_INVALID_ARGUMENT;
    if (p.images > kMaxBlocksBeside) return ALGM_UNSUPPORTED;
    if (p.count == 0) return ALGM_OK;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.count, kMoveWarps * kMoveRows)), static_cast<unsigned>(p.images));
    return with_word(p.width, p.dtype, values, out, [&](auto word, int words) {
        using Word = decltype(word);
        return start(apart_kernel<Word>, {grid, kMoveWarps * kWarp}, stream, length,
                     static_cast<int>(p.images * p.rows), static_cast<int>(p.first), static_cast<int>(p.count), words,
                     static_cast<const Word *>(values), static_cast<Word *>(out));
    });
}

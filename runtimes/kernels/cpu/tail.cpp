// unmerge and label_map: what turns the scores of merged tokens back into a picture.
#include "arithmetic.hpp"
#include "parts.hpp"

#include <vector>

using namespace algm;
using namespace algm::cpu;

namespace {

bool is_valid_map(const int64_t *map, int64_t count, int64_t prefix, int64_t rows) {
    return std::all_of(map, map + count, [=](int64_t row) { return row >= prefix && row - prefix < rows; });
}

// One class inside one cell: the scores of the two left corners and their steps to the right ones.
struct Candidate {
    float top, top_step, bottom, bottom_step;
    int32_t label;
};

// The classes that can win somewhere in a cell: interpolated values stay between the corners, so a class whose highest
// corner lies below the lowest corner of another is out. The margin covers the rounding of the interpolation.
template <class T>
void find_candidates(const T *const (&corners)[4], int64_t classes, std::vector<Candidate> &found) {
    float lower_bound = -HUGE_VALF, largest = 0;
    found.clear();
    for (int64_t k = 0; k < classes; ++k) {
        float c[4];
        for (int i = 0; i < 4; ++i) c[i] = to_float(corners[i][k]);
        if (!std::isfinite(c[0] + c[1] + c[2] + c[3])) continue;
        lower_bound = std::max(lower_bound, *std::min_element(c, c + 4));
        for (float corner : c) largest = std::max(largest, std::fabs(corner));
        found.push_back({c[0], c[1] - c[0], c[2], c[3] - c[2], static_cast<int32_t>(k)});
    }
    lower_bound -= kInterpolationMargin * largest;
    const auto loses = [&](const Candidate &one) {
        return std::max({to_float(corners[0][one.label]), to_float(corners[1][one.label]),
                         to_float(corners[2][one.label]), to_float(corners[3][one.label])}) < lower_bound;
    };
    found.erase(std::remove_if(found.begin(), found.end(), loses), found.end());
}

// A block of pixels of one cell, kLanes columns wide.
struct Block {
    static constexpr int kRows = 16;

    Lanes fx;         // weights of the right corners
    float fy[kRows];  // weights of the lower corners
    int rows;
    LaneIndices label[kRows];
};

// The best class of every pixel, the lower of equals: all columns at once, candidates in ascending order.
ALGM_VECTOR_CLONES void label_block(const Candidate *candidates, size_t count, Block &block) {
    Lanes best[Block::kRows];
    for (int r = 0; r < block.rows; ++r) {
        best[r] = Lanes{} - HUGE_VALF;
        block.label[r] = LaneIndices{};
    }
    for (size_t i = 0; i < count; ++i) {
        const Candidate &one = candidates[i];
        const Lanes upper = one.top + block.fx * one.top_step, lower = one.bottom + block.fx * one.bottom_step;
        const Lanes step = lower - upper;
        for (int r = 0; r < block.rows; ++r) {
            const Lanes value = upper + block.fy[r] * step;
            const LaneIndices above = value > best[r];
            best[r] = above ? value : best[r];
            block.label[r] = above ? LaneIndices{} + one.label : block.label[r];
        }
    }
}

// Labels the pixels of a part, block by block.
template <class Label>
void label_part(const Axis &down, const Axis &across, const Part &part, const std::vector<Candidate> &candidates,
                Label *labels) {
    for (int32_t y0 = part.top; y0 < part.bottom; y0 += Block::kRows)
        for (int32_t x0 = part.left; x0 < part.right; x0 += kLanes) {
            Block block;
            block.rows = std::min(Block::kRows, part.bottom - y0);
            for (int l = 0; l < kLanes; ++l) block.fx[l] = across.fraction(x0 + l, part.cx);
            for (int r = 0; r < block.rows; ++r) block.fy[r] = down.fraction(y0 + r, part.cy);
            label_block(candidates.data(), candidates.size(), block);
            for (int r = 0; r < block.rows; ++r)
                for (int32_t x = x0; x < std::min(x0 + kLanes, part.right); ++x)
                    labels[int64_t{y0 + r} * across.pixels + x] = static_cast<Label>(block.label[r][x - x0]);
        }
}

// The lines of one image that are asked for; `labels` is where the image's first line would lie.
template <class T, class Label>
void label_lines(const algm_label_map_params &p, const T *scores, const int64_t *map,
                 std::vector<Candidate> &candidates, Label *labels) {
    const Axis down(p.grid_h, p.height), across(p.grid_w, p.width);
    for_each_part(p, down, across, [&](const Part &part) {
        const T *corners[4];
        for (int i = 0; i < 4; ++i) corners[i] = scores + (map[part.corner[i]] - p.prefix) * p.classes;
        find_candidates(corners, p.classes, candidates);
        label_part(down, across, part, candidates, labels);
    });
}

// Whether the map names rows that exist for all cells that these lines lie between.
bool is_valid_part(const algm_label_map_params &p, const int64_t *map) {
    const Axis down(p.grid_h, p.height);
    const int64_t top = down.patch(down.cell(static_cast<int32_t>(p.first)));
    const int64_t bottom = down.patch(down.cell(static_cast<int32_t>(p.first + p.lines - 1)) + 1);
    for (int64_t b = 0; b < p.batch; ++b)
        if (!is_valid_map(map + (b * p.grid_h + top) * p.grid_w, (bottom + 1 - top) * p.grid_w, p.prefix, p.rows))
            return false;
    return true;
}

template <class T, class Label>
void label_batch(const algm_label_map_params &p, const T *scores, const int64_t *map, Label *labels) {
    std::vector<Candidate> candidates;
    candidates.reserve(static_cast<size_t>(p.classes));
    for (int64_t b = 0; b < p.batch; ++b)
        label_lines(p, scores + b * p.rows * p.classes, map + b * p.grid_h * p.grid_w, candidates,
                    labels + (b * p.lines - p.first) * p.width);
}

}  // namespace

int algm_cpu_unmerge(const algm_unmerge_params *params, const void *values, const int64_t *map, void *out, void *) {
    if (const int status = check(params)) return status;
    if (any_null(values, map, out)) return ALGM_INVALID_ARGUMENT;
    const algm_unmerge_params &p = *params;
    if (!is_valid_map(map, p.batch * p.patches, p.prefix, p.rows)) return ALGM_INVALID_MAP;
    const int64_t bytes = p.width * dtype_bytes(p.dtype);
    for (int64_t i = 0; i < p.batch * p.patches; ++i) {
        const int64_t row = i / p.patches * p.rows + map[i] - p.prefix;
        std::memcpy(static_cast<char *>(out) + i * bytes, static_cast<const char *>(values) + row * bytes,
                    static_cast<size_t>(bytes));
    }
    return ALGM_OK;
}

int algm_cpu_label_map(const algm_label_map_params *params, const void *scores, const int64_t *map, void *labels,
                       void *) {
    if (const int status = check(params)) return status;
    if (any_null(scores, map, labels)) return ALGM_INVALID_ARGUMENT;
    const algm_label_map_params &p = *params;
    if (!is_valid_part(p, map)) return ALGM_INVALID_MAP;
    return with_memory([&] {
        with_dtype(p.dtype, [&](auto type) {
            const auto *values = static_cast<const decltype(type) *>(scores);
            if (p.label_type == ALGM_LABEL_UINT8)
                label_batch(p, values, map, static_cast<uint8_t *>(labels));
            else
                label_batch(p, values, map, static_cast<int32_t *>(labels));
        });
    });
}

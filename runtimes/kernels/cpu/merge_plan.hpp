// What clap and gbm share on the CPU: ranks, the row count, and the weighted mean that carries out a plan.
#pragma once

#include "arithmetic.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace algm::cpu {

// What `decide` leaves for `apply`. `source` (B,S): for an output row the input row it copies, or -1 - i for the merge
// number i: the window i for CLAP, the row i of set B together with every row of set A whose target it is for GBM.
struct Plan {
    int64_t *rows;    // (1) S' or S''
    int64_t *length;  // (B)
    int32_t *source;  // (B,S)

    template <class Params>
    Plan(const Params &p, Carver &carver)
        : rows(carver.take<int64_t>(1)),
          length(carver.take<int64_t>(p.batch)),
          source(carver.take<int32_t>(p.batch * p.rows)) {}

    void publish(const int64_t *lengths, int64_t batch, int64_t *out_rows, int32_t *rows_int32) const {
        std::copy_n(lengths, batch, length);
        *rows = *out_rows = *std::max_element(length, length + batch);
        if (rows_int32 != nullptr) *rows_int32 = static_cast<int32_t>(*rows);
    }
};

struct ClapPlan : Plan {
    float *similarity;  // (B,W)
    int32_t *place;     // (B,W) rank of a merged window among the merged ones, -1 if it stays

    ClapPlan(const algm_clap_params &p, Carver &carver)
        : Plan(p, carver),
          similarity(carver.take<float>(p.batch * window_count(p))),
          place(carver.take<int32_t>(p.batch * window_count(p))) {}
};

struct GbmPlan : Plan {
    int32_t *target;    // (B,A) the row of set B that the i-th row of set A joins, -1 if it stays
    int32_t *row;       // (B,S) new row of every input row
    float *best;        // (B,A)
    int32_t *best_row;  // (B,A)

    GbmPlan(const algm_gbm_params &p, Carver &carver)
        : Plan(p, carver),
          target(carver.take<int32_t>(p.batch * max_a(p))),
          row(carver.take<int32_t>(p.batch * p.rows)),
          best(carver.take<float>(p.batch * max_a(p))),
          best_row(carver.take<int32_t>(p.batch * max_a(p))) {}
};

// What a merge by budget sorts by: a similarity that is no number comes last.
inline float sortable(float value) { return std::isnan(value) ? -std::numeric_limits<float>::infinity() : value; }

// Position of item i when `count` values are sorted in descending order, ties by index; no number comes last.
inline int64_t rank_among_all(const float *values, int64_t count, int64_t i) {
    const float own = sortable(values[i]);
    int64_t rank = 0;
    for (int64_t j = 0; j < count; ++j) {
        const float other = sortable(values[j]);
        rank += other > own || (other == own && j < i);
    }
    return rank;
}

// The same among the values that are `chosen`; -1 where this one is not.
template <class Chosen>
int64_t rank_of(const float *values, int64_t count, int64_t i, Chosen chosen) {
    if (!chosen(values[i])) return -1;
    int64_t rank = 0;
    for (int64_t j = 0; j < count; ++j)
        rank += chosen(values[j]) && (values[j] > values[i] || (values[j] == values[i] && j < i));
    return rank;
}

template <class Chosen>
int64_t count_of(const float *values, int64_t count, Chosen chosen) {
    return std::count_if(values, values + count, chosen);
}

// The mean of several rows of one image, by size or plain; sums in fp32, in the order in which rows are added.
template <class T>
class RowMean {
public:
    RowMean(const T *tokens, const float *size, int64_t width, bool weighted)
        : tokens_(tokens), size_(size), width_(width), weighted_(weighted) {}

    // members(add) calls add(row) for every row of the merge; it runs once for the sizes and once per strip of values.
    template <class Members>
    void write(Members members, T *out, float *out_size) const {
        float weight = 0, size = 0;
        members([&](int64_t row) {
            weight += weight_of(row);
            size += size_[row];
        });
        *out_size = size;
        for (int64_t start = 0; start < width_; start += kStrip) {
            const int64_t count = std::min(kStrip, width_ - start);
            float sum[kStrip] = {};
            members([&](int64_t row) {
                const T *values = tokens_ + row * width_ + start;
                const float w = weight_of(row);
                for (int64_t d = 0; d < count; ++d) sum[d] += w * to_float(values[d]);
            });
            for (int64_t d = 0; d < count; ++d) out[start + d] = from_float<T>(weight > 0 ? sum[d] / weight : 0.0f);
        }
    }

    void copy(int64_t row, T *out, float *out_size) const {
        std::memcpy(out, tokens_ + row * width_, static_cast<size_t>(width_) * sizeof(T));
        *out_size = size_[row];
    }

private:
    static constexpr int64_t kStrip = 256;

    float weight_of(int64_t row) const { return weighted_ ? size_[row] : 1.0f; }

    const T *tokens_;
    const float *size_;
    int64_t width_;
    bool weighted_;
};

// Carries out a plan: `members_of(plan, b, merge)` gives the member enumeration of one merged row of image b.
template <class Plan, class Params, class MembersOf>
int apply_plan(const Params *params, const void *tokens, const float *size, const void *workspace, int64_t out_rows,
               void *out_tokens, float *out_size, bool weighted, MembersOf members_of) {
    if (const int status = check(params)) return status;
    if (const int status = check_apply(*params, tokens, size, workspace, out_rows, out_tokens, out_size)) return status;
    const Plan plan = plan_in<Plan>(workspace, *params);
    const int64_t rows_in = params->rows, width = params->width, rows = output_rows(out_rows, *plan.rows, rows_in);
    if (rows < *plan.rows) return ALGM_INVALID_ARGUMENT;
    with_dtype(params->dtype, [&](auto type) {
        using T = decltype(type);
        for (int64_t b = 0; b < params->batch; ++b) {
            const RowMean<T> mean(static_cast<const T *>(tokens) + b * rows_in * width, size + b * rows_in, width,
                                  weighted);
            T *out = static_cast<T *>(out_tokens) + b * rows * width;
            for (int64_t row = 0; row < rows; ++row, out += width) {
                float *new_size = out_size + b * rows + row;
                const int32_t from = row < plan.length[b] ? plan.source[b * rows_in + row] : 0;
                if (row >= plan.length[b]) {
                    std::memset(static_cast<void *>(out), 0, static_cast<size_t>(width) * sizeof(T));
                    *new_size = 0;
                } else if (from >= 0) {
                    mean.copy(from, out, new_size);
                } else {
                    mean.write(members_of(plan, b, -1 - from), out, new_size);
                }
            }
        }
    });
    return ALGM_OK;
}

}  // namespace algm::cpu

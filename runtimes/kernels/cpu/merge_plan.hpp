// What clap and gbm share on the CPU: ranks, the row count, and the weighted mean that carries out a plan.
#pragma once

#include "ragged.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace algm::cpu {

// What `decide` leaves for `apply`. `source` (B,S): for an output row the input row it copies, or -1 - i for the merge
// number i: the window i for CLAP, the row i of set B together with every row of set A whose target it is for GBM.
struct Plan {
    int64_t *rows;    // (1) S' or S'', or all of ragged results
    int64_t *length;  // (B)
    int32_t *source;  // (B,S)

    template <class Params>
    Plan(const Params &p, Carver &carver)
        : rows(carver.take<int64_t>(1)),
          length(carver.take<int64_t>(p.batch)),
          source(carver.take<int32_t>(p.batch * most_rows(p))) {}

    template <class Params>
    void publish(const Params &p, const int64_t *lengths, int64_t *out_rows, int32_t *rows_int32) const {
        std::copy_n(lengths, p.batch, length);
        *rows = *out_rows = writes_ragged(p.ragged) ? std::accumulate(length, length + p.batch, int64_t{0})
                                                    : *std::max_element(length, length + p.batch);
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
          row(carver.take<int32_t>(p.batch * most_rows(p))),
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
// `lengths`: of ragged tokens, else null.
template <class Plan, class Params, class MembersOf>
int apply_plan(const Params *params, const void *tokens, const float *size, const int64_t *lengths,
               const void *workspace, int64_t out_rows, void *out_tokens, float *out_size, bool weighted,
               MembersOf members_of) {
    if (const int status = check(params)) return status;
    const Params &p = *params;
    if (const int status = check_apply(p, tokens, size, workspace, out_rows, out_tokens, out_size)) return status;
    const Plan plan = plan_in<Plan>(workspace, p);
    const bool ragged = writes_ragged(p.ragged);
    const int64_t counted = ragged ? mean_rows(*plan.rows, p.batch) : *plan.rows;
    const int64_t rows = output_rows(out_rows, counted, p.rows), all_rows = p.batch * rows;
    if (rows < counted) return ALGM_INVALID_ARGUMENT;
    const std::vector<int64_t> from = starts_of(lengths, p.batch, p.rows);
    const std::vector<int64_t> to = starts_of(ragged ? plan.length : nullptr, p.batch, rows);
    with_dtype(p.dtype, [&](auto type) {
        using T = decltype(type);
        T *out = static_cast<T *>(out_tokens);
        int64_t next = 0;  // row of the output
        const auto pad_until = [&](int64_t end) {
            if (end <= next) return;
            std::memset(static_cast<void *>(out + next * p.width), 0, static_cast<size_t>((end - next) * p.width) * sizeof(T));
            std::fill(out_size + next, out_size + end, 0.0f);
            next = end;
        };
        for (int64_t b = 0; b < p.batch; ++b) {
            const int64_t first = from[static_cast<size_t>(b)];
            const RowMean<T> mean(static_cast<const T *>(tokens) + first * p.width, size + first, p.width, weighted);
            const int32_t *source = plan.source + b * most_rows(p);
            pad_until(to[static_cast<size_t>(b)]);
            for (int64_t row = 0; row < plan.length[b]; ++row, ++next) {
                if (source[row] >= 0)
                    mean.copy(source[row], out + next * p.width, out_size + next);
                else
                    mean.write(members_of(plan, b, -1 - source[row]), out + next * p.width, out_size + next);
            }
        }
        pad_until(all_rows);
    });
    return ALGM_OK;
}

}  // namespace algm::cpu

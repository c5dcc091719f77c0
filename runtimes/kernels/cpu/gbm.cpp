#include "merge_plan.hpp"

#include <limits>
#include <vector>

using namespace algm;
using namespace algm::cpu;

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Allowed rows of sets A and B in one image.
struct Split {
    int64_t a0, b0, a_count, b_count;

    Split(const algm_gbm_params &p, int64_t length)
        : a0(first_a(p)),
          b0(first_b(p)),
          a_count(every_second(a0, existing_rows(length, most_rows(p)))),
          b_count(every_second(b0, existing_rows(length, most_rows(p)))) {}
};

// Best row of set B for every row of set A, four rows of B at a time; the first of equals stays.
template <class T>
ALGM_INLINE void best_matches(const Split &split, int64_t width, const T *tokens, float *best, int32_t *best_row) {
    constexpr int R = 4;
    std::vector<float> own(static_cast<size_t>(split.a_count));
    for (int64_t i = 0; i < split.a_count; ++i)
        own[static_cast<size_t>(i)] = inverse_norm(tokens + (split.a0 + 2 * i) * width, width);
    for (int64_t j = 0; j < split.b_count; j += R) {
        const int count = static_cast<int>(std::min<int64_t>(R, split.b_count - j));
        const T *rows[R];
        float scale[R], products[R];
        for (int r = 0; r < R; ++r) {
            rows[r] = tokens + (split.b0 + 2 * (j + std::min(r, count - 1))) * width;
            scale[r] = inverse_norm(rows[r], width);
        }
        for (int64_t i = 0; i < split.a_count; ++i) {
            dots<T, R>(tokens + (split.a0 + 2 * i) * width, rows, width, products);
            for (int r = 0; r < count; ++r) {
                const float cosine = products[r] * own[static_cast<size_t>(i)] * scale[r];
                if (cosine > best[i]) {
                    best[i] = cosine;
                    best_row[i] = static_cast<int32_t>(split.b0 + 2 * (j + r));
                }
            }
        }
    }
}

ALGM_VECTOR_CLONES void matches_of(const Split &split, int64_t width, const float *tokens, float *best, int32_t *row) {
    best_matches(split, width, tokens, best, row);
}
ALGM_VECTOR_CLONES void matches_of(const Split &split, int64_t width, const Half *tokens, float *best, int32_t *row) {
    best_matches(split, width, tokens, best, row);
}
ALGM_VECTOR_CLONES void matches_of(const Split &split, int64_t width, const Bfloat16 *tokens, float *best,
                                   int32_t *row) {
    best_matches(split, width, tokens, best, row);
}

// Whether lengths are those of ragged tokens.
bool holds_images(const algm_gbm_params &p, const int64_t *length) {
    return are_ragged(length, p.batch, p.rows, p.prefix, most_rows(p));
}

struct Statistics {
    double mean, deviation;
};

// Mean and unbiased deviation of the finite values; NaN where fewer than two exist.
Statistics statistics(const float *values, int64_t count) {
    double sum = 0, squares = 0;
    int64_t finite = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!std::isfinite(values[i])) continue;
        sum += values[i];
        ++finite;
    }
    if (finite < 2) return {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};
    const double mean = sum / static_cast<double>(finite);
    for (int64_t i = 0; i < count; ++i) {
        if (!std::isfinite(values[i])) continue;
        const double difference = values[i] - mean;
        squares += difference * difference;
    }
    return {mean, std::sqrt(squares / static_cast<double>(finite - 1))};
}

// The similarity that image b must reach.
float limit_of(const algm_gbm_params &p, const float *best, const int64_t *length, int64_t b, float threshold) {
    if (p.rule == ALGM_RULE_FIXED) return threshold;
    const bool together = p.batch_mode == ALGM_BATCH_MIN;
    Statistics sum = {0, 0};
    const int64_t begin = together ? 0 : b, end = together ? p.batch : b + 1;
    for (int64_t image = begin; image < end; ++image) {
        const Statistics one = statistics(best + image * max_a(p), Split(p, length[image]).a_count);
        sum.mean += one.mean;
        sum.deviation += one.deviation;
    }
    const double images = static_cast<double>(end - begin);
    return static_cast<float>(sum.mean / images + double{threshold} * (sum.deviation / images) / p.divisor);
}

auto reaches(const algm_gbm_params &p, float limit) {
    const bool strict = p.semantics == ALGM_SEMANTICS_PAPER;
    return [strict, limit](float value) { return std::isfinite(value) && (strict ? value > limit : value >= limit); };
}

// By budget: unsets the targets of all but the most similar rows of set A. A row whose similarities are no numbers has no
// match and may be among them all the same: it joins the first row of set B.
void choose_most_similar(const algm_gbm_params &p, const Split &split, const float *values, const int32_t *match,
                         int32_t *target) {
    const int64_t merges = split.b_count > 0 ? std::min(p.budget, split.a_count) : 0;
    for (int64_t i = 0; i < split.a_count; ++i) {
        const bool joins = rank_among_all(values, split.a_count, i) < merges;
        target[i] = !joins ? -1 : match[i] >= 0 ? match[i] : static_cast<int32_t>(split.b0);
    }
}

// New rows of one image: [prefix | rows of A that stay | rows of B]; returns how many.
int64_t number_rows(const algm_gbm_params &p, const Split &split, const int32_t *target, int32_t *row,
                    int32_t *source) {
    for (int64_t r = 0; r < p.prefix; ++r) row[r] = source[r] = static_cast<int32_t>(r);
    int64_t next = p.prefix;
    for (int64_t i = 0; i < split.a_count; ++i) {
        if (target[i] >= 0) continue;
        const int32_t from = static_cast<int32_t>(split.a0 + 2 * i);
        row[from] = static_cast<int32_t>(next);
        source[next++] = from;
    }
    for (int64_t j = 0; j < split.b_count; ++j) {
        const int32_t from = static_cast<int32_t>(split.b0 + 2 * j);
        row[from] = static_cast<int32_t>(next);
        source[next++] = from;
    }
    for (int64_t i = 0; i < split.a_count; ++i) {
        if (target[i] < 0) continue;
        row[split.a0 + 2 * i] = row[target[i]];
        source[row[target[i]]] = -1 - target[i];
    }
    return next;
}

}  // namespace

size_t algm_cpu_gbm_workspace(const algm_gbm_params *params) {
    return check(params) == ALGM_OK ? plan_bytes<GbmPlan>(*params) : 0;
}

int64_t algm_cpu_gbm_candidates(const algm_gbm_params *params) { return check(params) == ALGM_OK ? max_a(*params) : 0; }

int algm_cpu_gbm_similarity(const algm_gbm_params *params, const void *tokens, const int64_t *length, float *best,
                            int32_t *best_row, void *workspace, void *) {
    if (const int status = check(params)) return status;
    if (any_null(tokens, length, workspace) || lacks_matches(*params, best, best_row)) return ALGM_INVALID_ARGUMENT;
    const bool ragged = reads_ragged(params->ragged);
    if (ragged && !holds_images(*params, length)) return ALGM_INVALID_ARGUMENT;
    const std::vector<int64_t> starts = starts_of(ragged ? length : nullptr, params->batch, params->rows);
    const int64_t candidates = max_a(*params);
    std::fill_n(best, params->batch * candidates, kNothing);
    std::fill_n(best_row, params->batch * candidates, -1);
    with_dtype(params->dtype, [&](auto type) {
        const auto *values = static_cast<const decltype(type) *>(tokens);
        for (int64_t b = 0; b < params->batch; ++b)
            matches_of(Split(*params, length[b]), params->width, values + starts[static_cast<size_t>(b)] * params->width,
                       best + b * candidates, best_row + b * candidates);
    });
    return ALGM_OK;
}

int algm_cpu_gbm_decide_given(const algm_gbm_params *params, const float *best, const int32_t *best_row,
                              const int64_t *map, const int64_t *length, const float *threshold, int64_t *out_map,
                              int64_t *out_length, int64_t *rows, int32_t *rows_int32, void *workspace, void *) {
    if (const int status = check(params)) return status;
    const algm_gbm_params &p = *params;
    if (any_null(map, length, out_map, out_length, rows, workspace) || lacks_threshold(p.rule, threshold) ||
        lacks_matches(p, best, best_row))
        return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<GbmPlan>(workspace, p);
    const int64_t candidates = max_a(p);
    const auto chosen_of = [&](int64_t b) { return reaches(p, limit_of(p, best, length, b, *threshold)); };
    const bool counted = counts_merges(p.rule), together = p.batch_mode == ALGM_BATCH_MIN && !counted;
    int64_t fewest = candidates;
    for (int64_t b = 0; together && b < p.batch; ++b)
        fewest = std::min(fewest, count_of(best + b * candidates, Split(p, length[b]).a_count, chosen_of(b)));
    for (int64_t b = 0; b < p.batch; ++b) {
        const Split split(p, length[b]);
        const float *values = best + b * candidates;
        int32_t *target = plan.target + b * candidates;
        int32_t *row = plan.row + b * most_rows(p);
        const int32_t *match = best_row + b * candidates;
        if (counted) {
            choose_most_similar(p, split, values, match, target);
        } else {
            const auto chosen = chosen_of(b);
            for (int64_t i = 0; i < split.a_count; ++i) {
                const bool joins = chosen(values[i]) &&
                                   (!together || rank_of(values, split.a_count, i, chosen) < fewest);
                target[i] = joins ? match[i] : -1;
            }
        }
        std::fill(target + split.a_count, target + candidates, -1);
        out_length[b] = number_rows(p, split, target, row, plan.source + b * most_rows(p));
        for (int64_t patch = b * p.patches; patch < (b + 1) * p.patches; ++patch) {
            if (map[patch] < 0 || map[patch] >= std::max(existing_rows(length[b], most_rows(p)), p.prefix))
                return ALGM_INVALID_MAP;
            out_map[patch] = row[map[patch]];
        }
    }
    plan.publish(p, out_length, rows, rows_int32);
    return ALGM_OK;
}

int algm_cpu_gbm_decide(const algm_gbm_params *params, const void *tokens, const int64_t *map, const int64_t *length,
                        const float *threshold, int64_t *out_map, int64_t *out_length, int64_t *rows,
                        int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check(params)) return status;
    if (workspace == nullptr) return ALGM_INVALID_ARGUMENT;
    const auto plan = plan_in<GbmPlan>(workspace, *params);
    if (const int status = algm_cpu_gbm_similarity(params, tokens, length, plan.best, plan.best_row, workspace, stream))
        return status;
    return algm_cpu_gbm_decide_given(params, plan.best, plan.best_row, map, length, threshold, out_map, out_length,
                                     rows, rows_int32, workspace, stream);
}

int algm_cpu_gbm_apply(const algm_gbm_params *params, const void *tokens, const float *size, const int64_t *length,
                       const void *workspace, int64_t out_rows, void *out_tokens, float *out_size, void *) {
    const auto members_of = [params](const GbmPlan &plan, int64_t b, int64_t row) {
        const int64_t candidates = max_a(*params), a0 = first_a(*params);
        return [=, target = plan.target + b * candidates](auto add) {
            add(row);
            for (int64_t i = 0; i < candidates; ++i)
                if (target[i] == row) add(a0 + 2 * i);
        };
    };
    if (const int status = check(params)) return status;
    const bool ragged = reads_ragged(params->ragged);
    if (lacks_rows(*params, out_rows) || (ragged && (length == nullptr || !holds_images(*params, length))))
        return ALGM_INVALID_ARGUMENT;
    const bool weighted = params->semantics == ALGM_SEMANTICS_CODE;
    return apply_plan<GbmPlan>(params, tokens, size, ragged ? length : nullptr, workspace, out_rows, out_tokens, out_size,
                               weighted, members_of);
}

#include "merge_plan.hpp"

#include <vector>

using namespace algm;
using namespace algm::cpu;

namespace {

// First patch of a window, as a raster index.
int64_t window_origin(const algm_clap_params &p, int64_t window) {
    const int64_t across = p.grid_w / p.window_w;
    return window / across * p.window_h * p.grid_w + window % across * p.window_w;
}

// Window of a patch, -1 on the border that no window covers.
int64_t window_of(const algm_clap_params &p, int64_t patch) {
    const int64_t down = p.grid_h / p.window_h, across = p.grid_w / p.window_w;
    const int64_t y = patch / p.grid_w / p.window_h, x = patch % p.grid_w / p.window_w;
    return y < down && x < across ? y * across + x : -1;
}

template <class T>
ALGM_INLINE void window_similarity(const algm_clap_params &p, const T *tokens, float *similarity) {
    const int64_t members = p.window_h * p.window_w;
    std::vector<float> scales(static_cast<size_t>(members));
    for (int64_t w = 0; w < window_count(p); ++w) {
        const T *first = tokens + (p.prefix + window_origin(p, w)) * p.width;
        const auto member = [&](int64_t i) { return first + (i / p.window_w * p.grid_w + i % p.window_w) * p.width; };
        float sum = 0;
        for (int64_t i = 0; i < members; ++i) {
            scales[static_cast<size_t>(i)] = inverse_norm(member(i), p.width);
            for (int64_t j = 0; j < i; ++j)
                sum += dot(member(i), member(j), p.width) * scales[static_cast<size_t>(i)] *
                       scales[static_cast<size_t>(j)];
        }
        similarity[w] = 2 * sum / static_cast<float>(members * (members - 1));
    }
}

ALGM_VECTOR_CLONES void similarity_of(const algm_clap_params &p, const float *tokens, float *similarity) {
    window_similarity(p, tokens, similarity);
}
ALGM_VECTOR_CLONES void similarity_of(const algm_clap_params &p, const Half *tokens, float *similarity) {
    window_similarity(p, tokens, similarity);
}
ALGM_VECTOR_CLONES void similarity_of(const algm_clap_params &p, const Bfloat16 *tokens, float *similarity) {
    window_similarity(p, tokens, similarity);
}

auto qualifies(const algm_clap_params &p, float threshold) {
    const bool strict = p.semantics == ALGM_SEMANTICS_PAPER;
    return [strict, threshold](float value) { return strict ? value > threshold : value >= threshold; };
}

// Place of every window among the `merges` merged ones, -1 for those that stay. rank_at(w) is negative for those that
// may not merge.
template <class Rank>
void place_windows(const algm_clap_params &p, int64_t merges, Rank rank_at, int32_t *place) {
    const int64_t windows = window_count(p);
    int32_t next = 0;
    for (int64_t w = 0; w < windows; ++w) {
        const int64_t rank = rank_at(w);
        const bool merged = rank >= 0 && rank < merges;
        const bool raster = p.order == ALGM_ORDER_RASTER;
        place[w] = !merged ? -1 : raster ? next++ : static_cast<int32_t>(rank);
    }
}

// New rows of one image: [prefix | merged windows | other patches]; returns how many.
int64_t number_rows(const algm_clap_params &p, const int32_t *place, int64_t merges, int64_t *map, int32_t *source) {
    for (int64_t row = 0; row < p.prefix; ++row) source[row] = static_cast<int32_t>(row);
    int64_t next = p.prefix + merges;
    for (int64_t patch = 0; patch < p.grid_h * p.grid_w; ++patch) {
        const int64_t window = window_of(p, patch);
        const bool merged = window >= 0 && place[window] >= 0;
        map[patch] = merged ? p.prefix + place[window] : next++;
        source[map[patch]] = static_cast<int32_t>(merged ? -1 - window : p.prefix + patch);
    }
    return next;
}

}  // namespace

const char *algm_cpu_status_text(int status) { return status_sentence(status); }

size_t algm_cpu_clap_workspace(const algm_clap_params *params) {
    return check(params) == ALGM_OK ? plan_bytes<ClapPlan>(*params) : 0;
}

int algm_cpu_clap_similarity(const algm_clap_params *params, const void *tokens, float *similarity, void *) {
    if (const int status = check(params)) return status;
    if (tokens == nullptr || is_missing(similarity, window_count(*params))) return ALGM_INVALID_ARGUMENT;
    with_dtype(params->dtype, [&](auto type) {
        const auto *values = static_cast<const decltype(type) *>(tokens);
        for (int64_t b = 0; b < params->batch; ++b)
            similarity_of(*params, values + b * params->rows * params->width, similarity + b * window_count(*params));
    });
    return ALGM_OK;
}

int algm_cpu_clap_decide_given(const algm_clap_params *params, const float *similarity, const float *threshold,
                               int64_t *map, int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace,
                               void *) {
    if (const int status = check(params)) return status;
    if (any_null(map, length, rows, workspace) || lacks_threshold(params->rule, threshold) ||
        is_missing(similarity, window_count(*params)))
        return ALGM_INVALID_ARGUMENT;
    const algm_clap_params &p = *params;
    const auto plan = plan_in<ClapPlan>(workspace, p);
    const int64_t windows = window_count(p);
    const bool counted = counts_merges(p.rule);
    const auto chosen = qualifies(p, counted ? 0 : *threshold);
    int64_t fewest = windows;
    for (int64_t b = 0; b < p.batch; ++b)
        fewest = std::min(fewest, count_of(similarity + b * windows, windows, chosen));
    for (int64_t b = 0; b < p.batch; ++b) {
        const float *values = similarity + b * windows;
        const int64_t merges = counted                            ? std::min(p.budget, windows)
                               : p.batch_mode == ALGM_BATCH_MIN ? fewest
                                                                  : count_of(values, windows, chosen);
        int32_t *place = plan.place + b * windows;
        const auto rank_at = [&](int64_t w) {
            return counted ? rank_among_all(values, windows, w) : rank_of(values, windows, w, chosen);
        };
        place_windows(p, merges, rank_at, place);
        length[b] = number_rows(p, place, merges, map + b * p.grid_h * p.grid_w, plan.source + b * p.rows);
    }
    plan.publish(p, length, rows, rows_int32);
    return ALGM_OK;
}

int algm_cpu_clap_decide(const algm_clap_params *params, const void *tokens, const float *threshold, int64_t *map,
                         int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream) {
    if (const int status = check(params)) return status;
    if (workspace == nullptr) return ALGM_INVALID_ARGUMENT;
    float *similarity = plan_in<ClapPlan>(workspace, *params).similarity;
    if (const int status = algm_cpu_clap_similarity(params, tokens, similarity, stream)) return status;
    return algm_cpu_clap_decide_given(params, similarity, threshold, map, length, rows, rows_int32, workspace, stream);
}

int algm_cpu_clap_apply(const algm_clap_params *params, const void *tokens, const float *size, const void *workspace,
                        int64_t out_rows, void *out_tokens, float *out_size, void *) {
    const auto members_of = [params](const ClapPlan &, int64_t, int64_t window) {
        return [&p = *params, first = params->prefix + window_origin(*params, window)](auto add) {
            for (int64_t y = 0; y < p.window_h; ++y)
                for (int64_t x = 0; x < p.window_w; ++x) add(first + y * p.grid_w + x);
        };
    };
    return apply_plan<ClapPlan>(params, tokens, size, nullptr, workspace, out_rows, out_tokens, out_size, true, members_of);
}

// What the CPU and the CUDA version share: argument checks, shapes that follow from the parameters, workspace layout.
#pragma once

#include "algm_kernels.h"

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define ALGM_EVERYWHERE __host__ __device__
#else
#define ALGM_EVERYWHERE
#endif

namespace algm {

// Row indices are int32 inside the kernels; one image's tokens and the whole batch's rows must be countable with them.
constexpr int64_t kMaxRows = int64_t{1} << 30;
constexpr float kNormEps = 1e-8f;  // norms are clamped here, as torch's cosine_similarity does

inline bool fits(int64_t a, int64_t b) { return a <= kMaxRows && b <= kMaxRows && a * b <= kMaxRows; }

// Rows that exist in an image: a length is data, which may hold anything.
ALGM_EVERYWHERE inline int64_t existing_rows(int64_t length, int64_t rows) {
    return length < 0 ? 0 : length > rows ? rows : length;
}

// Rows that each of `images` must have room for, if one behind the other they have `counted`.
ALGM_EVERYWHERE inline int64_t mean_rows(int64_t counted, int64_t images) {
    const int32_t each = static_cast<int32_t>(images);  // as below
    return (static_cast<int32_t>(counted) + each - 1) / each;
}

// Rows of an image in the output of `apply`, where the longest image of an input of `rows` rows has kept `counted`, or the
// images of ragged results have on average.
ALGM_EVERYWHERE inline int64_t output_rows(int64_t out_rows, int64_t counted, int64_t rows) {
    if (out_rows >= 0) return out_rows;
    const int32_t step = static_cast<int32_t>(-out_rows);  // 64 bits would be slow to divide by
    const int64_t next = int64_t{(static_cast<int32_t>(counted) - 1) / step + 1} * step;
    return counted <= 0 ? 0 : next < rows ? next : rows;
}

inline bool is_one_of_two(int32_t value) { return value == 0 || value == 1; }

inline bool counts_merges(int32_t rule) { return rule == ALGM_RULE_BUDGET; }

inline bool reads_ragged(int32_t ragged) { return (ragged & ALGM_RAGGED_IN) != 0; }
inline bool writes_ragged(int32_t ragged) { return (ragged & ALGM_RAGGED_OUT) != 0; }

// Whether the rule needs a threshold and there is none.
inline bool lacks_threshold(int32_t rule, const float *threshold) {
    return !counts_merges(rule) && threshold == nullptr;
}

inline bool is_dtype(int32_t dtype) { return dtype >= ALGM_FLOAT32 && dtype <= ALGM_BFLOAT16; }

inline int64_t dtype_bytes(int32_t dtype) { return dtype == ALGM_FLOAT32 ? 4 : 2; }

inline int64_t window_count(const algm_clap_params &p) { return (p.grid_h / p.window_h) * (p.grid_w / p.window_w); }

// Sets A and B of GBM are every second row from these two on. The published program splits the whole sequence (even
// rows are A) and then protects the prefix; the paper splits what follows the prefix.
inline int64_t first_a(const algm_gbm_params &p) {
    return p.semantics == ALGM_SEMANTICS_PAPER ? p.prefix : p.prefix + p.prefix % 2;
}
inline int64_t first_b(const algm_gbm_params &p) {
    return p.semantics == ALGM_SEMANTICS_PAPER ? p.prefix + 1 : p.prefix + (p.prefix + 1) % 2;
}
inline int64_t every_second(int64_t first, int64_t end) { return end > first ? (end - first + 1) / 2 : 0; }

// The most rows that an image can have: of a ragged one, as many as a map can tell apart.
inline int64_t most_rows(const algm_clap_params &p) { return p.rows; }
inline int64_t most_rows(const algm_gbm_params &p) { return reads_ragged(p.ragged) ? p.prefix + p.patches : p.rows; }

inline int64_t max_a(const algm_gbm_params &p) { return every_second(first_a(p), most_rows(p)); }
inline int64_t max_b(const algm_gbm_params &p) { return every_second(first_b(p), most_rows(p)); }

inline bool any_null() { return false; }
template <class... Rest>
bool any_null(const void *first, Rest... rest) {
    return first == nullptr || any_null(rest...);
}

// An array without elements may be a null pointer.
inline bool is_missing(const void *array, int64_t count) { return array == nullptr && count > 0; }

inline int check(const algm_clap_params *p) {
    if (p == nullptr || p->batch < 1 || p->width < 1 || p->prefix < 0 || p->grid_h < 1 || p->grid_w < 1 ||
        p->budget < 0 || p->window_h < 1 || p->window_w < 1 || (p->window_h == 1 && p->window_w == 1))
        return ALGM_INVALID_ARGUMENT;
    // Before anything is multiplied.
    if (!fits(p->grid_h, p->grid_w) || !fits(p->window_h, p->window_w) || p->prefix > kMaxRows) return ALGM_UNSUPPORTED;
    if (p->rows != p->prefix + p->grid_h * p->grid_w || !is_dtype(p->dtype) || !is_one_of_two(p->semantics) ||
        !is_one_of_two(p->batch_mode) || !is_one_of_two(p->order) ||
        (p->rule != ALGM_RULE_THRESHOLD && p->rule != ALGM_RULE_BUDGET) ||
        (p->ragged != 0 && p->ragged != ALGM_RAGGED_OUT))
        return ALGM_INVALID_ARGUMENT;
    return fits(p->batch, p->rows) && p->width <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_gbm_params *p) {
    if (p == nullptr || p->batch < 1 || p->rows < 1 || p->width < 1 || p->patches < 1 || p->prefix < 0 ||
        (!reads_ragged(p->ragged) && p->prefix > p->rows) || p->budget < 0 || !(p->divisor > 0))
        return ALGM_INVALID_ARGUMENT;
    if (!is_dtype(p->dtype) || !is_one_of_two(p->semantics) || !is_one_of_two(p->batch_mode) ||
        p->rule < ALGM_RULE_ADAPTIVE || p->rule > ALGM_RULE_BUDGET || p->ragged < 0 ||
        p->ragged > (ALGM_RAGGED_IN | ALGM_RAGGED_OUT))
        return ALGM_INVALID_ARGUMENT;
    const bool countable = fits(p->batch, p->rows) && fits(p->batch, p->patches) && p->prefix <= kMaxRows &&
                           fits(p->batch, most_rows(*p)) && p->width <= kMaxRows;
    return countable ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_unmerge_params *p) {
    if (p == nullptr || p->batch < 1 || p->rows < 1 || p->width < 1 || p->patches < 1 || p->prefix < 0 ||
        !is_dtype(p->dtype))
        return ALGM_INVALID_ARGUMENT;
    const bool countable = fits(p->batch, p->patches) && fits(p->batch, p->rows) && p->width <= kMaxRows;
    return countable && p->prefix <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

// Whether a picture has the lines that are asked for.
template <class Params>
bool has_lines(const Params &p) {
    return p.first >= 0 && p.lines >= 1 && p.first < p.height && p.lines <= p.height - p.first;
}

inline int check(const algm_label_map_params *p) {
    if (p == nullptr || p->batch < 1 || p->rows < 1 || p->classes < 1 || p->grid_h < 1 || p->grid_w < 1 ||
        p->height < 1 || p->width < 1 || p->prefix < 0 || !has_lines(*p) || !is_dtype(p->dtype) ||
        !is_one_of_two(p->label_type))
        return ALGM_INVALID_ARGUMENT;
    if (p->label_type == ALGM_LABEL_UINT8 && p->classes > 256) return ALGM_INVALID_ARGUMENT;
    const bool countable =
        fits(p->grid_h, p->grid_w) && fits(p->height, p->width) && fits(p->batch, p->rows) && p->classes <= kMaxRows;
    return countable && p->prefix <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_mask_labels_params *p) {
    if (p == nullptr || p->batch < 1 || p->queries < 1 || p->classes < 1 || p->grid_h < 1 || p->grid_w < 1 ||
        p->height < 1 || p->width < 1 || !has_lines(*p) || !is_dtype(p->dtype) || !is_one_of_two(p->label_type))
        return ALGM_INVALID_ARGUMENT;
    if (p->label_type == ALGM_LABEL_UINT8 && p->classes > 256) return ALGM_INVALID_ARGUMENT;
    if (!fits(p->grid_h, p->grid_w) || !fits(p->height, p->width)) return ALGM_UNSUPPORTED;
    // One image's masks and probabilities are counted in int32; the host rounds classes up.
    const bool countable = fits(p->queries, p->grid_h * p->grid_w) && p->classes <= kMaxRows / 2 &&
                           fits(p->queries, 2 * p->classes);
    return countable && p->batch <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_deformable_attention_params *p) {
    if (p == nullptr || p->batch < 1 || p->cells < 1 || p->heads < 1 || p->width < 1 || p->queries < 1 ||
        p->points < 1 || p->levels < 1 || p->levels > ALGM_MAX_LEVELS || !is_dtype(p->dtype))
        return ALGM_INVALID_ARGUMENT;
    int64_t cells = 0;
    for (int64_t level = 0; level < p->levels; ++level) {
        const int64_t rows = p->sides[2 * level], columns = p->sides[2 * level + 1];
        if (rows < 1 || columns < 1) return ALGM_INVALID_ARGUMENT;
        if (!fits(rows, columns)) return ALGM_UNSUPPORTED;
        cells += rows * columns;
    }
    if (cells != p->cells) return ALGM_INVALID_ARGUMENT;
    // One image's values, results and coordinates are counted in int32.
    if (!fits(p->heads, p->width) || !fits(p->cells, p->heads * p->width) || !fits(p->queries, p->heads * p->width))
        return ALGM_UNSUPPORTED;
    const int64_t places = 2 * p->levels * p->heads;
    return fits(p->points, places) && fits(p->queries, p->points * places) && p->batch <= kMaxRows ? ALGM_OK
                                                                                                 : ALGM_UNSUPPORTED;
}

inline int check(const algm_attention_params *p) {
    if (p == nullptr || p->images < 1 || p->rows < 0 || p->heads < 1 || p->side < 1 || !is_dtype(p->dtype) ||
        !(p->scale == p->scale) || !is_one_of_two(p->ragged))
        return ALGM_INVALID_ARGUMENT;
    return fits(p->images, p->rows) && fits(p->heads, p->side) ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_reframe_params *p) {
    if (p == nullptr || p->images < 1 || p->rows < 0 || p->width < 1 || p->skip < 0 || p->put < 0 || !is_dtype(p->dtype) ||
        p->skip > p->rows)
        return ALGM_INVALID_ARGUMENT;
    const bool countable = p->rows <= kMaxRows && p->put <= kMaxRows && fits(p->images, p->rows + p->put);
    return countable && p->width <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_apart_params *p) {
    if (p == nullptr || p->images < 1 || p->rows < 0 || p->width < 1 || p->first < 0 || p->count < 0 || !is_dtype(p->dtype))
        return ALGM_INVALID_ARGUMENT;
    const bool countable = fits(p->images, p->rows) && fits(p->images, p->count) && p->first <= kMaxRows;
    return countable && p->width <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_gelu_params *p) {
    if (p == nullptr || p->rows < 0 || p->width < 1 || !is_dtype(p->dtype)) return ALGM_INVALID_ARGUMENT;
    return p->rows <= kMaxRows && p->width <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

inline int check(const algm_bias_skip_norm_params *p) {
    if (p == nullptr || p->rows < 0 || p->width < 1 || !(p->epsilon >= 0) || !is_dtype(p->dtype))
        return ALGM_INVALID_ARGUMENT;
    return p->rows <= kMaxRows && p->width <= kMaxRows ? ALGM_OK : ALGM_UNSUPPORTED;
}

// Whether an argument of a sum or a norm is missing, or is there without the half it belongs to.
inline bool lacks_half(const algm_bias_skip_norm_params &p, const void *product, const float *bias, const void *residual,
                       const float *weight, const float *shift, const void *normed, const void *total) {
    const bool adds = bias != nullptr, norms = weight != nullptr;
    const bool no_sum = residual == nullptr && total == nullptr, no_norm = shift == nullptr && normed == nullptr;
    const bool whole_sum = adds ? !is_missing(residual, p.rows) && !is_missing(total, p.rows) : no_sum;
    const bool whole_norm = norms ? shift != nullptr && !is_missing(normed, p.rows) : no_norm;
    return is_missing(product, p.rows) || (!adds && !norms) || !whole_sum || !whole_norm;
}

constexpr int64_t kChannels = 3;  // of a picture

inline int check(const algm_patches_params *p) {
    if (p == nullptr || p->images < 1 || p->height < 1 || p->width < 1 || p->side < 1 || !is_dtype(p->dtype) ||
        !(p->centre == p->centre) || !(p->scale == p->scale) || p->height % p->side != 0 || p->width % p->side != 0)
        return ALGM_INVALID_ARGUMENT;
    const bool countable = fits(p->height, p->width) && p->images <= kMaxRows;
    return countable && fits(kChannels * p->images, p->height * p->width) ? ALGM_OK : ALGM_UNSUPPORTED;
}

// The arguments of `apply`. Outputs without rows may be null pointers.
template <class Params>
int check_apply(const Params &p, const void *tokens, const float *size, const void *workspace, int64_t out_rows,
                const void *out_tokens, const float *out_size) {
    if (any_null(tokens, size, workspace) || (out_rows != 0 && any_null(out_tokens, out_size)))
        return ALGM_INVALID_ARGUMENT;
    return out_rows >= -kMaxRows && fits(p.batch, out_rows) ? ALGM_OK : ALGM_UNSUPPORTED;
}

// Whether `apply` is asked to round up rows of which it does not know how many an image can have.
inline bool lacks_rows(const algm_gbm_params &p, int64_t out_rows) {
    return reads_ragged(p.ragged) && !writes_ragged(p.ragged) && out_rows < 0;
}

// Whether a caller that gives matches gives none of one kind.
inline bool lacks_matches(const algm_gbm_params &p, const float *best, const int32_t *best_row) {
    return is_missing(best, max_a(p)) || is_missing(best_row, max_a(p));
}

// Hands out the parts of a workspace in order; from a null base it only measures.
class Carver {
public:
    explicit Carver(void *base) : base_(static_cast<char *>(base)) {}

    template <class T>
    T *take(int64_t count) {
        T *part = base_ == nullptr ? nullptr : reinterpret_cast<T *>(base_ + used_);
        used_ += (static_cast<size_t>(count) * sizeof(T) + 15) / 16 * 16;
        return part;
    }

    size_t used() const { return used_; }

private:
    char *base_;
    size_t used_ = 0;
};

// The plan of a merge in the caller's workspace.
template <class Plan, class Params>
Plan plan_in(const void *workspace, const Params &p) {
    Carver carver(const_cast<void *>(workspace));
    return Plan(p, carver);
}

template <class Plan, class Params>
size_t plan_bytes(const Params &p) {
    Carver carver(nullptr);
    Plan(p, carver);
    return carver.used();
}

inline const char *status_sentence(int status) {
    switch (status) {
        case ALGM_OK: return "The call succeeded.";
        case ALGM_INVALID_ARGUMENT:
            return "A size, an enum value or a pointer contradicts algm_kernels.h: check the shapes against the "
                   "attributes.";
        case ALGM_UNSUPPORTED: return "The shape is larger than these kernels can index: use a smaller batch or image.";
        case ALGM_INVALID_MAP: return "The token map names a row that the values do not have: check map and prefix.";
        case ALGM_OUT_OF_MEMORY: return "The host is out of memory: use a smaller batch or image, or fewer threads.";
        default: return "An unknown status code.";
    }
}

}  // namespace algm

// Attention over the product of a linear layer with tokens.
#include "ragged.hpp"

#include <algorithm>
#include <vector>

using namespace algm;
using namespace algm::cpu;

namespace {

// `count` rows of a head, with the bias of the part: queries, keys or values.
template <class T>
void take_part(const algm_attention_params &p, const T *rows, const float *bias, int64_t part, int64_t head,
               int64_t count, float *out) {
    const int64_t width = p.heads * p.side, first = part * width + head * p.side;
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < p.side; ++i)
            out[row * p.side + i] = to_float(rows[row * 3 * width + first + i]) +
                                    (bias == nullptr || part == 1 ? 0.0f : bias[first + i]);
}

// One head of one image; `parts` holds three times `count` rows, `weights` as many numbers as rows.
template <class T>
void attend(const algm_attention_params &p, const T *rows, const float *bias, int64_t head, int64_t count, float *parts,
            float *weights, float *mixed, T *out) {
    const int64_t side = p.side, width = p.heads * side;
    const float *queries = parts, *keys = parts + count * side, *values = keys + count * side;
    for (int64_t part = 0; part < 3; ++part) take_part(p, rows, bias, part, head, count, parts + part * count * side);
    for (int64_t row = 0; row < count; ++row) {
        float largest = -INFINITY, total = 0;
        for (int64_t key = 0; key < count; ++key) {
            weights[key] = dot(queries + row * side, keys + key * side, side) * p.scale;
            largest = std::max(largest, weights[key]);
        }
        std::fill_n(mixed, side, 0.0f);
        for (int64_t key = 0; key < count; ++key) {
            const float weight = std::exp(weights[key] - largest);
            total += weight;
            for (int64_t i = 0; i < side; ++i) mixed[i] += weight * values[key * side + i];
        }
        for (int64_t i = 0; i < side; ++i) out[row * width + head * side + i] = from_float<T>(mixed[i] / total);
    }
}

}  // namespace

int algm_cpu_attention(const algm_attention_params *params, const void *product, const float *bias,
                       const int64_t *length, void *out, void *) {
    if (const int status = check(params)) return status;
    const algm_attention_params &p = *params;
    if (any_null(product, out) || (p.ragged && (length == nullptr || !are_ragged(length, p.images, p.rows))))
        return ALGM_INVALID_ARGUMENT;
    const int64_t width = p.heads * p.side, all_rows = p.images * p.rows, most = p.ragged ? all_rows : p.rows;
    const std::vector<int64_t> starts = starts_of(p.ragged ? length : nullptr, p.images, p.rows);
    std::vector<float> parts(static_cast<size_t>(3 * most * p.side)), weights(static_cast<size_t>(most)),
        mixed(static_cast<size_t>(p.side));
    with_dtype(p.dtype, [&](auto type) {
        using T = decltype(type);
        for (int64_t image = 0; image < p.images; ++image) {
            const int64_t start = starts[static_cast<size_t>(image)];
            const int64_t count = length == nullptr ? p.rows : existing_rows(length[image], most);
            const T *rows = static_cast<const T *>(product) + start * 3 * width;
            T *results = static_cast<T *>(out) + start * width;
            for (int64_t head = 0; head < p.heads; ++head)
                attend(p, rows, bias, head, count, parts.data(), weights.data(), mixed.data(), results);
            const int64_t end = image + 1 == p.images ? all_rows : starts[static_cast<size_t>(image + 1)];
            std::fill(results + count * width, static_cast<T *>(out) + end * width, from_float<T>(0.0f));
        }
    });
    return ALGM_OK;
}

// deformable_attention: what queries find at their own places of a few grids.
#include "../sampling.hpp"
#include "arithmetic.hpp"

#include <vector>

using namespace algm;
using namespace algm::cpu;

namespace {

// One of an image's four cells with its share: a row (D) of values, null outside.
template <class T>
struct Found {
    const T *row;
    float share;
};

// Values d, d + 1, ... of out = the sum of share * row, in the order of the list.
template <class T>
ALGM_INLINE void sum_lanes(const Found<T> *found, size_t count, int64_t d, int64_t lanes, T *out) {
    Lanes total = {};
    for (size_t i = 0; i < count; ++i) {
        Lanes value = {};
        if (found[i].row != nullptr) load(found[i].row + d, lanes, value);
        total += value * found[i].share;
    }
    for (int l = 0; l < lanes; ++l) out[d + l] = from_float<T>(total[l]);
}

// A number of lanes that the compiler knows is one load.
template <class T>
ALGM_INLINE void sum(const Found<T> *found, size_t count, int64_t width, T *out) {
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) sum_lanes(found, count, d, kLanes, out);
    if (d < width) sum_lanes(found, count, d, width - d, out);
}

ALGM_VECTOR_CLONES void sum_of(const Found<float> *found, size_t count, int64_t width, float *out) {
    sum(found, count, width, out);
}
ALGM_VECTOR_CLONES void sum_of(const Found<Half> *found, size_t count, int64_t width, Half *out) {
    sum(found, count, width, out);
}
ALGM_VECTOR_CLONES void sum_of(const Found<Bfloat16> *found, size_t count, int64_t width, Bfloat16 *out) {
    sum(found, count, width, out);
}

// One image: every query's heads, one after the other.
template <class T>
void attend(const algm_deformable_attention_params &p, const T *value, const float *locations, const float *shares,
            T *out) {
    const Levels levels(p);
    const int64_t stride = p.heads * p.width;
    std::vector<Found<T>> found(static_cast<size_t>(4 * p.levels * p.points));
    for (int64_t q = 0; q < p.queries; ++q)
        for (int64_t head = 0; head < p.heads; ++head, out += p.width) {
            Found<T> *next = found.data();
            for (int32_t l = 0; l < levels.count; ++l)
                for (int32_t i = 0; i < levels.points; ++i, locations += 2, ++shares) {
                    const Corners corners(levels.level[l], locations[0], locations[1], *shares);
                    for (int c = 0; c < 4; ++c) {
                        const int32_t cell = corners.cell[c];
                        *next++ = {cell < 0 ? nullptr : value + cell * stride + head * p.width, corners.share[c]};
                    }
                }
            sum_of(found.data(), found.size(), p.width, out);
        }
}

}  // namespace

int algm_cpu_deformable_attention(const algm_deformable_attention_params *params, const void *value,
                                  const float *locations, const float *shares, void *out, void *) {
    if (const int status = check(params)) return status;
    if (any_null(value, locations, shares, out)) return ALGM_INVALID_ARGUMENT;
    const algm_deformable_attention_params &p = *params;
    const int64_t values = p.cells * p.heads * p.width, results = p.queries * p.heads * p.width;
    const int64_t places = p.queries * p.heads * p.levels * p.points;
    return with_memory([&] {
        with_dtype(p.dtype, [&](auto type) {
            using T = decltype(type);
            for (int64_t b = 0; b < p.batch; ++b)
                attend(p, static_cast<const T *>(value) + b * values, locations + 2 * b * places, shares + b * places,
                       static_cast<T *>(out) + b * results);
        });
    });
}

// Rows of ragged images, moved.
#include "ragged.hpp"

using namespace algm;
using namespace algm::cpu;

namespace {

// Copies rows, counted in the bytes that one has.
class Mover {
public:
    Mover(void *out, int64_t width, int32_t dtype) : out_(static_cast<char *>(out)), bytes_(width * dtype_bytes(dtype)) {}

    void copy(const void *values, int64_t from, int64_t to, int64_t count) const {
        if (count > 0) std::memcpy(at(to), static_cast<const char *>(values) + from * bytes_, size(count));
    }

    void clear(int64_t to, int64_t count) const {
        if (count > 0) std::memset(at(to), 0, size(count));
    }

private:
    char *at(int64_t row) const { return out_ + row * bytes_; }
    size_t size(int64_t count) const { return static_cast<size_t>(count * bytes_); }

    char *out_;
    int64_t bytes_;
};

// Values in another type.
std::vector<char> converted(const float *values, int64_t count, int32_t dtype) {
    std::vector<char> bytes(static_cast<size_t>(count * dtype_bytes(dtype)));
    with_dtype(dtype, [&](auto type) {
        using T = decltype(type);
        std::transform(values, values + count, reinterpret_cast<T *>(bytes.data()), from_float<T>);
    });
    return bytes;
}

}  // namespace

int algm_cpu_reframe(const algm_reframe_params *params, const void *values, const int64_t *length, const float *front,
                     void *out, void *) {
    if (const int status = check(params)) return status;
    const algm_reframe_params &p = *params;
    const int64_t rows = p.rows - p.skip + p.put;
    if (is_missing(values, p.rows) || length == nullptr || is_missing(front, p.put) || is_missing(out, rows) ||
        !are_ragged(length, p.images, p.rows))
        return ALGM_INVALID_ARGUMENT;
    if (*std::min_element(length, length + p.images) < p.skip) return ALGM_INVALID_ARGUMENT;
    const std::vector<char> put = converted(front, p.put * p.width, p.dtype);
    const Mover mover(out, p.width, p.dtype);
    int64_t to = 0, from = 0;
    for (int64_t image = 0; image < p.images; ++image) {
        const int64_t kept = length[image] - p.skip;
        mover.copy(put.data(), 0, to, p.put);
        mover.copy(values, from + p.skip, to + p.put, kept);
        to += p.put + kept;
        from += length[image];
    }
    mover.clear(to, p.images * rows - to);
    return ALGM_OK;
}

int algm_cpu_apart(const algm_apart_params *params, const void *values, const int64_t *length, void *out, void *) {
    if (const int status = check(params)) return status;
    const algm_apart_params &p = *params;
    if (is_missing(values, p.rows) || length == nullptr || is_missing(out, p.count) ||
        !are_ragged(length, p.images, p.rows))
        return ALGM_INVALID_ARGUMENT;
    const Mover mover(out, p.width, p.dtype);
    int64_t from = 0;
    for (int64_t image = 0; image < p.images; ++image) {
        const int64_t count = std::clamp(length[image] - p.first, int64_t{0}, p.count);
        mover.copy(values, from + p.first, image * p.count, count);
        mover.clear(image * p.count + count, p.count - count);
        from += length[image];
    }
    return ALGM_OK;
}

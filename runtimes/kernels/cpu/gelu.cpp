// GELU of the product of a linear layer and its bias.
#include "arithmetic.hpp"

using namespace algm;
using namespace algm::cpu;

int algm_cpu_gelu(const algm_gelu_params *params, const void *product, const float *bias, void *out, void *) {
    if (const int status = check(params)) return status;
    const algm_gelu_params &p = *params;
    if (is_missing(product, p.rows) || any_null(bias) || is_missing(out, p.rows)) return ALGM_INVALID_ARGUMENT;
    with_dtype(p.dtype, [&](auto type) {
        using T = decltype(type);
        const T *values = static_cast<const T *>(product);
        T *results = static_cast<T *>(out);
        for (int64_t row = 0; row < p.rows; ++row)
            for (int64_t i = 0; i < p.width; ++i) {
                const float x = to_float(values[row * p.width + i]) + bias[i];
                results[row * p.width + i] = from_float<T>(0.5f * x * std::erfc(x * -0.70710678f));
            }
    });
    return ALGM_OK;
}

// Bias, residual and layer normalisation behind the product of a linear layer.
#include "arithmetic.hpp"

using namespace algm;
using namespace algm::cpu;

namespace {

template <class T>
void add_row(int64_t width, const T *product, const float *bias, const T *residual, T *total) {
    for (int64_t i = 0; i < width; ++i)
        total[i] = from_float<T>(to_float(residual[i]) + (to_float(product[i]) + bias[i]));
}

template <class T>
void norm_row(int64_t width, float epsilon, const T *total, const float *weight, const float *shift, T *normed) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < width; ++i) sum += to_float(total[i]);
    const double mean = sum / static_cast<double>(width);
    for (int64_t i = 0; i < width; ++i) {
        const double centred = to_float(total[i]) - mean;
        squares += centred * centred;
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
    for (int64_t i = 0; i < width; ++i)
        normed[i] = from_float<T>(static_cast<float>((to_float(total[i]) - mean) * scale * weight[i] + shift[i]));
}

}  // namespace

int algm_cpu_bias_skip_norm(const algm_bias_skip_norm_params *params, const void *product, const float *bias,
                             const void *residual, const float *weight, const float *shift, void *normed, void *total,
                             void *) {
    if (const int status = check(params)) return status;
    const algm_bias_skip_norm_params &p = *params;
    if (lacks_half(p, product, bias, residual, weight, shift, normed, total)) return ALGM_INVALID_ARGUMENT;
    with_dtype(p.dtype, [&](auto type) {
        using T = decltype(type);
        for (int64_t row = 0; row < p.rows; ++row) {
            const int64_t first = row * p.width;
            const T *summed = static_cast<const T *>(product) + first;
            if (bias != nullptr) {
                T *sum = static_cast<T *>(total) + first;
                add_row(p.width, summed, bias, static_cast<const T *>(residual) + first, sum);
                summed = sum;
            }
            if (weight != nullptr)
                norm_row(p.width, p.epsilon, summed, weight, shift, static_cast<T *>(normed) + first);
        }
    });
    return ALGM_OK;
}

// Pixels as rows, one a patch.
#include "arithmetic.hpp"

using namespace algm;
using namespace algm::cpu;

int algm_cpu_patches(const algm_patches_params *params, const void *image, void *out, void *) {
    if (const int status = check(params)) return status;
    if (any_null(image, out)) return ALGM_INVALID_ARGUMENT;
    const algm_patches_params &p = *params;
    const int64_t across = p.width / p.side, row = kChannels * p.side * p.side;
    with_dtype(p.dtype, [&](auto type) {
        using T = decltype(type);
        const T *pixels = static_cast<const T *>(image);
        T *rows = static_cast<T *>(out);
        for (int64_t plane = 0; plane < p.images * kChannels; ++plane)
            for (int64_t y = 0; y < p.height; ++y, pixels += p.width) {
                const int64_t down = plane / kChannels * (p.height / p.side) + y / p.side;
                const int64_t line = (plane % kChannels * p.side + y % p.side) * p.side;
                for (int64_t x = 0; x < p.width; ++x)
                    rows[(down * across + x / p.side) * row + line + x % p.side] =
                        from_float<T>((to_float(pixels[x]) - p.centre) * p.scale);
            }
    });
    return ALGM_OK;
}

// Half-pixel bilinear interpolation along one axis (align_corners=False), in fp32 as PyTorch computes it.
#pragma once

#include "common.hpp"

namespace algm {

// Rounding moves an interpolated score by at most ten units of 2^-24 of the largest score around, six with fused
// multiply-adds. A class is dropped only when it loses by more than the errors of the scores compared: two on the CPU,
// where one side are patches, four on the GPU.
constexpr float kInterpolationMargin = 2e-6f;

// `cells` patches stretched over `pixels` pixels. Cell c, from -1 to cells - 1, holds the pixels between the centres of
// patches c and c + 1; the outermost two hold those beyond the last centre, where both ends are the same patch.
struct Axis {
    float scale;
    int32_t cells, pixels;

    Axis(int64_t cells_, int64_t pixels_)
        : scale(static_cast<float>(cells_) / static_cast<float>(pixels_)),
          cells(static_cast<int32_t>(cells_)),
          pixels(static_cast<int32_t>(pixels_)) {}

    // Position of a pixel's centre in units of patches, 0 at the first patch's centre. No fused multiply-add: its
    // other rounding would move a pixel that lies on a patch centre to the neighbouring cell.
    ALGM_EVERYWHERE float centre(int32_t pixel) const {
#ifdef __CUDA_ARCH__
        return __fadd_rn(__fmul_rn(static_cast<float>(pixel) + 0.5f, scale), -0.5f);
#else
        const float scaled = (static_cast<float>(pixel) + 0.5f) * scale;
        return scaled - 0.5f;
#endif
    }

    ALGM_EVERYWHERE int32_t cell(int32_t pixel) const {
        const float position = centre(pixel);
        const int32_t whole = position < 0 ? -1 : static_cast<int32_t>(position);
        return whole < cells ? whole : cells - 1;
    }

    // First pixel of a cell; `pixels` for cell = cells.
    ALGM_EVERYWHERE int32_t first_pixel(int32_t cell_index) const {
        if (cell_index < 0) return 0;
        if (pixels % (2 * cells) == 0) {  // pixel centres keep half a pixel away from patch centres
            const int32_t ratio = pixels / cells;
            return cell_index < cells ? cell_index * ratio + ratio / 2 : pixels;
        }
        const float guess = (static_cast<float>(cell_index) + 0.5f) / scale - 0.5f;
        int32_t pixel = guess < 0 ? 0 : static_cast<int32_t>(guess);
        pixel = pixel < pixels ? pixel : pixels;
        while (pixel > 0 && cell(pixel - 1) >= cell_index) --pixel;
        while (pixel < pixels && cell(pixel) < cell_index) ++pixel;
        return pixel;
    }

    ALGM_EVERYWHERE int32_t patch(int32_t cell_index) const {
        return cell_index < 0 ? 0 : cell_index < cells ? cell_index : cells - 1;
    }

    // Weight of patch c + 1 at a pixel of cell c.
    ALGM_EVERYWHERE float fraction(int32_t pixel, int32_t cell_index) const {
        return centre(pixel) - static_cast<float>(cell_index);
    }
};

}  // namespace algm

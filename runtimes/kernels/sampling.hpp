// Places of bilinear sampling in the levels of deformable attention, in fp32.
#pragma once

#include "common.hpp"

#include <cmath>

namespace algm {

struct Level {
    int32_t rows, columns, first;  // of all cells
};

// The levels in order.
struct Levels {
    Level level[ALGM_MAX_LEVELS];
    int32_t count, points;

    explicit Levels(const algm_deformable_attention_params &p)
        : level{}, count(static_cast<int32_t>(p.levels)), points(static_cast<int32_t>(p.points)) {
        int32_t first = 0;
        for (int32_t i = 0; i < count; ++i) {
            level[i] = {p.sides[2 * i], p.sides[2 * i + 1], first};
            first += level[i].rows * level[i].columns;
        }
    }
};

// A coordinate in [0, 1] along an axis of `side` cells: the cell before it, from -2 to side + 1, and how far it is beyond
// that cell's centre; NaN if it is. No fused multiply-add: on a cell's centre another rounding would take other cells.
struct Along {
    int32_t cell;
    float beyond;

    ALGM_EVERYWHERE Along(float coordinate, int32_t side) {
        const float last = static_cast<float>(side) + 1;
#ifdef __CUDA_ARCH__
        float at = __fadd_rn(__fmul_rn(coordinate, static_cast<float>(side)), -0.5f);
#else
        const float scaled = coordinate * static_cast<float>(side);
        float at = scaled - 0.5f;
#endif
        at = at > last ? last : at < -2 ? -2 : at;
        const float whole = floorf(at);
        beyond = at - whole;
        cell = whole == whole ? static_cast<int32_t>(whole) : -2;
    }
};

// The four cells around a place, and its shares of them. A cell outside is -1, and its value zero.
struct Corners {
    int32_t cell[4];
    float share[4];

    ALGM_EVERYWHERE Corners(const Level &level, float across, float down, float share_of_place) {
        const Along x(across, level.columns), y(down, level.rows);
        const float upper = share_of_place * (1 - y.beyond), lower = share_of_place * y.beyond;
        for (int32_t i = 0; i < 4; ++i) {
            const int32_t row = y.cell + i / 2, column = x.cell + i % 2;
            const bool inside = row >= 0 && row < level.rows && column >= 0 && column < level.columns;
            cell[i] = inside ? level.first + row * level.columns + column : -1;
            share[i] = (i < 2 ? upper : lower) * (i % 2 == 0 ? 1 - x.beyond : x.beyond);
        }
    }
};

}  // namespace algm

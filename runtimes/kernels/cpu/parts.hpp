// The rectangles in which the pixels of each cell lie, of some lines of a picture.
#pragma once

#include "../interpolation.hpp"

#include <algorithm>

namespace algm::cpu {

// A rectangle of pixels of one cell, and where its four corners lie on the grid: left and right above, then below.
struct Part {
    int32_t cy, cx, top, bottom, left, right;
    int64_t corner[4];

    bool is_empty() const { return top >= bottom || left >= right; }
};

// Visits every part of the lines that are asked for. What a pixel gets follows from its cell alone, so it is the same
// whichever lines are.
template <class Params, class Visit>
void for_each_part(const Params &p, const Axis &down, const Axis &across, Visit visit) {
    const int32_t first = static_cast<int32_t>(p.first), end = static_cast<int32_t>(p.first + p.lines);
    const auto corner = [&](int32_t y, int32_t x) { return int64_t{down.patch(y)} * across.cells + across.patch(x); };
    for (int32_t cy = down.cell(first); cy <= down.cell(end - 1); ++cy)
        for (int32_t cx = -1; cx < across.cells; ++cx) {
            const Part part = {cy,
                               cx,
                               std::max(down.first_pixel(cy), first),
                               std::min(down.first_pixel(cy + 1), end),
                               across.first_pixel(cx),
                               across.first_pixel(cx + 1),
                               {corner(cy, cx), corner(cy, cx + 1), corner(cy + 1, cx), corner(cy + 1, cx + 1)}};
            if (!part.is_empty()) visit(part);
        }
}

}  // namespace algm::cpu

// Where images lie in an array: one behind the other, or equally far apart.
#pragma once

#include "arithmetic.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

namespace algm::cpu {

// The row at which each image starts: one behind the other if `length` is given, else `rows` apart.
inline std::vector<int64_t> starts_of(const int64_t *length, int64_t batch, int64_t rows) {
    std::vector<int64_t> starts(static_cast<size_t>(batch));
    for (int64_t b = 1; b < batch; ++b)
        starts[static_cast<size_t>(b)] = starts[static_cast<size_t>(b - 1)] + (length == nullptr ? rows : length[b - 1]);
    return starts;
}

// Whether ragged images have `fewest` to `most` rows and fit into their array.
inline bool are_ragged(const int64_t *length, int64_t batch, int64_t rows, int64_t fewest = 0,
                       int64_t most = kMaxRows) {
    const bool bounded = std::all_of(length, length + batch, [=](int64_t one) { return one >= fewest && one <= most; });
    return bounded && std::accumulate(length, length + batch, int64_t{0}) <= batch * rows;
}

}  // namespace algm::cpu

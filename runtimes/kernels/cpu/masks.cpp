// mask_labels: from masks and class probabilities of queries to labels.
#include "arithmetic.hpp"
#include "parts.hpp"

#include <vector>

// Lanes are handed over by value, but never called with: everything that takes or gives them is inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

using namespace algm;
using namespace algm::cpu;

namespace {

ALGM_INLINE Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
ALGM_INLINE Lanes power_of_two(LaneIndices n) { return (Lanes)((n + 127) << 23); }

// exp(x) for x <= 0 within two units of the last place, down to the smallest numbers there are: a polynomial of what is
// left of x / ln 2 behind its nearest whole number, whose power of two may be too small to be one factor.
ALGM_INLINE Lanes exp_below_zero(Lanes x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: behind it there is no room for a fraction
    x = larger(x, Lanes{} - 104.0f);
    const Lanes shifted = x * 1.44269504f + kShift, whole = shifted - kShift;
    const Lanes r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Lanes value = p * (r * r) + r + 1.0f;
    const LaneIndices n = (LaneIndices)shifted - (LaneIndices)(Lanes{} + kShift), half = n >> 1;
    return value * power_of_two(half) * power_of_two(n - half);
}

ALGM_INLINE Lanes sigmoid(Lanes x) {
    const LaneIndices negative = x < 0.0f;
    const Lanes small = exp_below_zero(negative ? x : -x);
    return (negative ? small : Lanes{} + 1.0f) / (1.0f + small);
}

// Memory of a vector of floats is not aligned as lanes are.
ALGM_INLINE Lanes lanes_at(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}
ALGM_INLINE void put_lanes(float *to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// One query inside one cell: masks at the two left corners and their steps to the right ones.
struct Corners {
    float top, top_step, bottom, bottom_step;
};

// What a thread works with, for one image.
struct Image {
    int64_t queries, classes, padded;  // classes up to a multiple of the lanes
    std::vector<float> shares;         // (Q, padded)
    std::vector<Corners> corners;      // (Q)
    std::vector<float> low, high;      // (Q, padded too): the least and the largest sigmoid in a cell
    std::vector<float> least, most;    // (padded): bounds of a class's sum in a cell
    std::vector<int32_t> listed;       // classes that can win in a cell
    std::vector<float> chosen;         // (Q, those of them)
    std::vector<float> covered;        // (Q, lanes): sigmoids of as many pixels

    explicit Image(const algm_mask_labels_params &p)
        : queries(p.queries),
          classes(p.classes),
          padded(whole_lanes(p.classes)),
          shares(static_cast<size_t>(queries * padded)),
          corners(static_cast<size_t>(queries)),
          low(static_cast<size_t>(whole_lanes(queries))),
          high(low.size()),
          least(static_cast<size_t>(padded)),
          most(least.size()),
          chosen(shares.size()),
          covered(static_cast<size_t>(queries * kLanes)) {
        listed.reserve(static_cast<size_t>(padded));
    }

    static int64_t whole_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

    void take(const float *probabilities) {
        for (int64_t q = 0; q < queries; ++q)
            std::copy_n(probabilities + q * classes, classes, shares.data() + q * padded);
    }
};

// Loads the corners of all queries, masks lying `apart`, and the least and the largest of each query's four. Returns the
// largest of all without its sign.
template <class T>
float load_corners(const T *const (&masks)[4], int64_t apart, Image &image) {
    float *low = image.low.data(), *high = image.high.data();
    float largest = 0;
    for (int64_t q = 0; q < image.queries; ++q) {
        float c[4];
        for (int i = 0; i < 4; ++i) c[i] = to_float(masks[i][q * apart]);
        image.corners[static_cast<size_t>(q)] = {c[0], c[1] - c[0], c[2], c[3] - c[2]};
        low[q] = std::min(std::min(c[0], c[1]), std::min(c[2], c[3]));
        high[q] = std::max(std::max(c[0], c[1]), std::max(c[2], c[3]));
        largest = std::max(largest, std::max(std::fabs(low[q]), std::fabs(high[q])));
    }
    return largest;
}

// Bounds of every class's sum in a cell: masks stay between their corners, and sums grow with them.
ALGM_VECTOR_CLONES void find_bounds(Image &image) {
    float *low = image.low.data(), *high = image.high.data();
    for (size_t i = 0; i < image.low.size(); i += kLanes) {
        put_lanes(low + i, sigmoid(lanes_at(low + i)));
        put_lanes(high + i, sigmoid(lanes_at(high + i)));
    }
    for (int64_t k = 0; k < image.padded; k += kLanes) {
        Lanes least = {}, most = {};
        const float *shares = image.shares.data() + k;
        for (int64_t q = 0; q < image.queries; ++q, shares += image.padded) {
            const Lanes share = lanes_at(shares);
            least += low[q] * share;
            most += high[q] * share;
        }
        put_lanes(image.least.data() + k, least);
        put_lanes(image.most.data() + k, most);
    }
}

// Lists the classes that can win somewhere in a cell, in ascending order, and puts their probabilities side by side: a
// class is out when the most that it can have is less than the least that another has. `rounding`: of a sum, relative to
// itself; whatever does not compare stays.
void list_classes(Image &image, float rounding) {
    const float *least = image.least.data(), *most = image.most.data();
    float bound = 0;
    for (int64_t k = 0; k < image.classes; ++k) bound = std::max(bound, least[k]);
    constexpr float kTiny = 1e-36f;  // what is not normal is rounded by more than its share
    bound = (bound - kTiny) * (1 - std::min(rounding, 1.0f));
    image.listed.clear();
    for (int64_t k = 0; k < image.classes; ++k)
        if (!(most[k] * (1 + rounding) < bound)) image.listed.push_back(static_cast<int32_t>(k));
    if (image.listed.empty()) image.listed.push_back(0);  // sums that fall where masks grow are none of probabilities
    const size_t count = image.listed.size();
    for (int64_t q = 0; q < image.queries; ++q)
        for (size_t i = 0; i < count; ++i)
            image.chosen[static_cast<size_t>(q) * count + i] = image.shares[static_cast<size_t>(q * image.padded) +
                                                                           static_cast<size_t>(image.listed[i])];
}

// Sums of CLASSES listed classes from `first` on, and who of them is the best so far; the lower of equals.
template <int CLASSES>
ALGM_INLINE void compare(const Image &image, size_t first, Lanes &best, LaneIndices &label) {
    Lanes sum[CLASSES] = {};
    const size_t count = image.listed.size();
    const float *shares = image.chosen.data() + first, *covered = image.covered.data();
    for (int64_t q = 0; q < image.queries; ++q, shares += count, covered += kLanes) {
        const Lanes there = lanes_at(covered);
        for (int i = 0; i < CLASSES; ++i) sum[i] += shares[i] * there;
    }
    for (int i = 0; i < CLASSES; ++i) {
        const LaneIndices above = sum[i] > best;
        best = above ? sum[i] : best;
        label = above ? LaneIndices{} + image.listed[first + static_cast<size_t>(i)] : label;
    }
}

// The best listed class of as many pixels of a cell as there are lanes, at the weights of their right and lower corners.
ALGM_VECTOR_CLONES void label_lanes(Image &image, const Lanes &fx, const Lanes &fy, LaneIndices &label) {
    float *covered = image.covered.data();
    for (const Corners &c : image.corners) {
        const Lanes upper = c.top + fx * c.top_step, lower = c.bottom + fx * c.bottom_step;
        put_lanes(covered, sigmoid(upper + fy * (lower - upper)));
        covered += kLanes;
    }
    Lanes best = Lanes{} - HUGE_VALF;
    label = LaneIndices{} + image.listed[0];
    constexpr int kTogether = 4;
    size_t first = 0;
    for (; first + kTogether <= image.listed.size(); first += kTogether) compare<kTogether>(image, first, best, label);
    for (; first < image.listed.size(); ++first) compare<1>(image, first, best, label);
}

// Labels the pixels of a part one line of them behind the other, lane by lane, so that small cells fill the lanes too.
template <class Label>
void label_part(Image &image, const Axis &down, const Axis &across, const Part &part, Label *labels) {
    const int32_t columns = part.right - part.left, count = (part.bottom - part.top) * columns;
    for (int32_t from = 0; from < count; from += kLanes) {
        Label *to[kLanes];
        Lanes fx, fy;
        LaneIndices label;
        for (int l = 0; l < kLanes; ++l) {
            const int32_t pixel = std::min(from + l, count - 1);
            const int32_t y = part.top + pixel / columns, x = part.left + pixel % columns;
            to[l] = labels + int64_t{y} * across.pixels + x;
            fx[l] = across.fraction(x, part.cx);
            fy[l] = down.fraction(y, part.cy);
        }
        if (image.listed.size() > 1) {
            label_lanes(image, fx, fy, label);
        } else {
            label = LaneIndices{} + image.listed[0];
        }
        for (int l = 0; l < kLanes; ++l) *to[l] = static_cast<Label>(label[l]);
    }
}

// The lines of one image that are asked for; `labels` is where the image's first line would lie.
template <class T, class Label>
void label_lines(const algm_mask_labels_params &p, const T *masks, Image &image, Label *labels) {
    const Axis down(p.grid_h, p.height), across(p.grid_w, p.width);
    const int64_t apart = p.grid_h * p.grid_w;
    for_each_part(p, down, across, [&](const Part &part) {
        const T *const corners[4] = {masks + part.corner[0], masks + part.corner[1], masks + part.corner[2],
                                     masks + part.corner[3]};
        const float largest = load_corners(corners, apart, image);
        find_bounds(image);
        // Of a sum by its members and what they are made of, and of masks by their interpolation.
        const float members = static_cast<float>(p.queries + 16);
        list_classes(image, 0x1p-23f * (members + 8 * largest));
        label_part(image, down, across, part, labels);
    });
}

template <class T, class Label>
void label_batch(const algm_mask_labels_params &p, const T *masks, const float *classes, Label *labels) {
    Image image(p);
    for (int64_t b = 0; b < p.batch; ++b) {
        image.take(classes + b * p.queries * p.classes);
        label_lines(p, masks + b * p.queries * p.grid_h * p.grid_w, image,
                    labels + (b * p.lines - p.first) * p.width);
    }
}

}  // namespace

int algm_cpu_mask_labels(const algm_mask_labels_params *params, const void *masks, const float *classes, void *labels,
                         void *) {
    if (const int status = check(params)) return status;
    if (any_null(masks, classes, labels)) return ALGM_INVALID_ARGUMENT;
    return with_memory([&] {
        with_dtype(params->dtype, [&](auto type) {
            const auto *values = static_cast<const decltype(type) *>(masks);
            if (params->label_type == ALGM_LABEL_UINT8)
                label_batch(*params, values, classes, static_cast<uint8_t *>(labels));
            else
                label_batch(*params, values, classes, static_cast<int32_t *>(labels));
        });
    });
}

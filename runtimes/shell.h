// What the shells around the kernels share: the operators' attributes, inputs, outputs and calls, without any runtime.
#pragma once

#include <algm_kernels.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace algm {

// Throws std::invalid_argument with the streamed parts as its reason.
template <class... Parts>
[[noreturn]] void fail(Parts const &...parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::invalid_argument(text.str());
}

// Throws unless both numbers agree; -1 stands for one that is not known yet.
inline void expectEqual(int64_t got, int64_t expected, char const *what) {
    if (got != expected && got >= 0 && expected >= 0) {
        fail(what, " should be ", expected, ", got ", got);
    }
}

// The value, unless it lies outside low to high; `what` names the attribute.
inline int32_t within(int64_t value, int32_t low, int32_t high, char const *what) {
    if (value < low || value > high) {
        fail("attribute ", what, " should lie in ", low, " to ", high, ", got ", value);
    }
    return static_cast<int32_t>(value);
}

// The kernels for one kind of memory.
struct Kernels {
    decltype(&algm_cpu_status_text) statusText;
    decltype(&algm_cpu_clap_workspace) clapWorkspace;
    decltype(&algm_cpu_clap_decide) clapDecide;
    decltype(&algm_cpu_clap_apply) clapApply;
    decltype(&algm_cpu_gbm_workspace) gbmWorkspace;
    decltype(&algm_cpu_gbm_decide) gbmDecide;
    decltype(&algm_cpu_gbm_apply) gbmApply;
    decltype(&algm_cpu_attention) attention;
    decltype(&algm_cpu_reframe) reframe;
    decltype(&algm_cpu_apart) apart;
    decltype(&algm_cpu_gelu) gelu;
    decltype(&algm_cpu_bias_skip_norm) biasSkipNorm;
    decltype(&algm_cpu_patches) patches;
    decltype(&algm_cpu_unmerge) unmerge;
    decltype(&algm_cpu_label_map) labelMap;
    decltype(&algm_cpu_mask_labels) maskLabels;
    decltype(&algm_cpu_deformable_attention) deformableAttention;
};

#define ALGM_KERNELS_OF(device)                                                                    \
    algm::Kernels {                                                                                \
        algm_##device##_status_text, algm_##device##_clap_workspace, algm_##device##_clap_decide,  \
            algm_##device##_clap_apply, algm_##device##_gbm_workspace, algm_##device##_gbm_decide, \
            algm_##device##_gbm_apply, algm_##device##_attention, algm_##device##_reframe,         \
            algm_##device##_apart, algm_##device##_gelu, algm_##device##_bias_skip_norm,          \
            algm_##device##_patches, algm_##device##_unmerge, algm_##device##_label_map,           \
            algm_##device##_mask_labels, algm_##device##_deformable_attention                      \
    }

// Types of inputs and outputs. Tokens have one of three, the same for all of a node.
enum class Type { kTokens, kFloat, kIndex, kLabels };

struct Port {
    char const *name;
    Type type;
    int32_t rank;
};

// The dimensions of every input.
using Shapes = int64_t const *const *;

// One call of an operator.
struct Launch {
    Kernels const &kernels;
    Shapes shapes;
    int32_t dtype;  // of the tokens
    void const *const *inputs;
    void *const *outputs;
    void *stream;

    template <class T>
    T const *in(int32_t index) const {
        return static_cast<T const *>(inputs[index]);
    }
    template <class T>
    T *out(int32_t index) const {
        return static_cast<T *>(outputs[index]);
    }
    // Throws unless a kernel succeeded; `what` says what was being done.
    void done(int status, char const *what) const {
        if (status != ALGM_OK) {
            fail(what, ": ", kernels.statusText(status));
        }
    }
};

// What `attributes` tells of one beside name and member: the least number, or the words, whose places are the values.
inline constexpr int32_t kMaxAttribute = 1 << 24;
struct Words {
    std::array<char const *, 4> word;
    size_t count;

    template <class... Word>
    constexpr Words(Word... words) : word{words...}, count(sizeof...(words)) {}
};
inline constexpr Words kSemantics{"code", "paper"};
inline constexpr Words kBatch{"per_image", "batch_min"};
inline constexpr Words kOrder{"published", "raster"};
inline constexpr Words kRule{"threshold", "adaptive", "fixed", "budget"};
inline constexpr Words kRagged{"none", "in", "out", "both"};

// An attribute of as many numbers as a node has, up to twice the levels of deformable attention.
struct Numbers {
    int32_t value[2 * ALGM_MAX_LEVELS], count;

    static int32_t counted(int64_t found, char const *what) {
        return within(found, 0, 2 * ALGM_MAX_LEVELS, what);
    }
};

// The outputs of both merges; the last one counts the rows, S' or S''. `decide` tells the count once more as INT32 to
// whoever wants it so.
inline constexpr std::array<Port, 5> kMerged{{{"tokens", Type::kTokens, 3},
                                              {"size", Type::kFloat, 2},
                                              {"map", Type::kIndex, 2},
                                              {"length", Type::kIndex, 1},
                                              {"rows", Type::kIndex, 0}}};

// tokens (B,S,D), size (B,S), threshold () -> tokens (B,S',D), size (B,S'), map (B,N), length (B), rows ().
struct Clap {
    static constexpr char const *kName = "clap";
    static constexpr bool kMerges = true;
    static constexpr std::array<Port, 3> kInputs{
        {{"tokens", Type::kTokens, 3}, {"size", Type::kFloat, 2}, {"threshold", Type::kFloat, 0}}};
    static constexpr auto kOutputs = kMerged;

    int32_t grid[2]{}, window[2]{}, prefix{}, semantics{}, batch{}, order{}, rule{}, budget{};
    int32_t ragged{};  // an attribute where a runtime has such tokens

    template <class Visit>
    void attributes(Visit &&visit) {
        visit("grid", grid, 1);
        visit("window", window, 1);
        visit("prefix", prefix, 0);
        visit("semantics", semantics, kSemantics);
        visit("batch", batch, kBatch);
        visit("order", order, kOrder);
        visit("rule", rule, kRule);
        visit("budget", budget, 0);
    }

    int64_t patches(Shapes) const { return int64_t{grid[0]} * grid[1]; }

    // Rows that every image keeps by the rule `budget`, as many as there are by the others.
    int64_t mostRows(Shapes in) const {
        int64_t const windows = int64_t{grid[0] / window[0]} * (grid[1] / window[1]);
        int64_t const merged = rule == ALGM_RULE_BUDGET ? std::min<int64_t>(budget, windows) : 0;
        return in[0][1] - merged * (int64_t{window[0]} * window[1] - 1);
    }

    void checkShapes(Shapes in) const {
        expectEqual(in[0][1], prefix + patches(in), "rows of tokens (prefix + grid)");
        expectEqual(in[1][0], in[0][0], "images of size");
        expectEqual(in[1][1], in[0][1], "rows of size");
    }

    size_t workspace(Kernels const &kernels, Shapes in, int32_t dtype) const {
        auto const p = params(in, dtype);
        return kernels.clapWorkspace(&p);
    }

    void decide(Launch const &call, void *plan, int32_t *rowsInt32 = nullptr) const {
        auto const p = params(call.shapes, call.dtype);
        call.done(call.kernels.clapDecide(&p, call.inputs[0], call.in<float>(2), call.out<int64_t>(2),
                                          call.out<int64_t>(3), call.out<int64_t>(4), rowsInt32, plan, call.stream),
                  "deciding which windows merge");
    }

    void apply(Launch const &call, void const *plan, int64_t rows) const {
        auto const p = params(call.shapes, call.dtype);
        call.done(call.kernels.clapApply(&p, call.inputs[0], call.in<float>(1), plan, rows, call.outputs[0],
                                         call.out<float>(1), call.stream),
                  "merging windows");
    }

private:
    algm_clap_params params(Shapes in, int32_t dtype) const {
        auto const *d = in[0];
        return {d[0], d[1], d[2], grid[0], grid[1], window[0], window[1], prefix, budget, dtype, semantics,
                batch, order, rule, ragged};
    }
};

// tokens (B,S,D), size (B,S), map (B,N), length (B), threshold ()
//   -> tokens (B,S'',D), size (B,S''), map (B,N), length (B), rows ().
struct Gbm {
    static constexpr char const *kName = "gbm";
    static constexpr bool kMerges = true;
    static constexpr std::array<Port, 5> kInputs{{{"tokens", Type::kTokens, 3},
                                                  {"size", Type::kFloat, 2},
                                                  {"map", Type::kIndex, 2},
                                                  {"length", Type::kIndex, 1},
                                                  {"threshold", Type::kFloat, 0}}};
    static constexpr auto kOutputs = kMerged;

    int32_t prefix{}, rule{};
    float divisor{};
    int32_t semantics{}, batch{}, budget{};
    int32_t ragged{};  // as for CLAP

    template <class Visit>
    void attributes(Visit &&visit) {
        visit("prefix", prefix, 0);
        visit("rule", rule, kRule);
        visit("divisor", divisor);
        visit("semantics", semantics, kSemantics);
        visit("batch", batch, kBatch);
        visit("budget", budget, 0);
    }

    int64_t patches(Shapes in) const { return in[2][1]; }

    // As for CLAP. Rows are [prefix | A and B in turn], where A is first but for the published program's odd prefix.
    int64_t mostRows(Shapes in) const {
        int64_t const behind = std::max<int64_t>(in[0][1] - prefix, 0);
        bool const bFirst = semantics == ALGM_SEMANTICS_CODE && prefix % 2 == 1;
        int64_t const sources = bFirst ? behind / 2 : (behind + 1) / 2, targets = behind - sources;
        int64_t const most = targets > 0 ? sources : 0;
        return in[0][1] - (rule == ALGM_RULE_BUDGET ? std::min<int64_t>(budget, most) : 0);
    }

    void checkShapes(Shapes in) const {
        expectEqual(in[1][0], in[0][0], "images of size");
        expectEqual(in[1][1], in[0][1], "rows of size");
        expectEqual(in[2][0], in[0][0], "images of map");
        expectEqual(in[3][0], in[0][0], "images of length");
    }

    size_t workspace(Kernels const &kernels, Shapes in, int32_t dtype) const {
        auto const p = params(in, dtype);
        return kernels.gbmWorkspace(&p);
    }

    void decide(Launch const &call, void *plan, int32_t *rowsInt32 = nullptr) const {
        auto const p = params(call.shapes, call.dtype);
        call.done(call.kernels.gbmDecide(&p, call.inputs[0], call.in<int64_t>(2), call.in<int64_t>(3),
                                         call.in<float>(4), call.out<int64_t>(2), call.out<int64_t>(3),
                                         call.out<int64_t>(4), rowsInt32, plan, call.stream),
                  "deciding which tokens merge");
    }

    void apply(Launch const &call, void const *plan, int64_t rows) const {
        auto const p = params(call.shapes, call.dtype);
        call.done(call.kernels.gbmApply(&p, call.inputs[0], call.in<float>(1), call.in<int64_t>(3), plan, rows,
                                        call.outputs[0], call.out<float>(1), call.stream),
                  "merging tokens");
    }

private:
    algm_gbm_params params(Shapes in, int32_t dtype) const {
        auto const *d = in[0];
        return {d[0], d[1], d[2], patches(in), prefix, budget, divisor, dtype, semantics, batch, rule, ragged};
    }
};

// values (B,S,C), map (B,N) -> (B,N,C).
struct Unmerge {
    static constexpr char const *kName = "unmerge";
    static constexpr bool kMerges = false;
    static constexpr std::array<Port, 2> kInputs{{{"values", Type::kTokens, 3}, {"map", Type::kIndex, 2}}};
    static constexpr std::array<Port, 1> kOutputs{{{"values", Type::kTokens, 3}}};

    int32_t prefix{};

    template <class Visit>
    void attributes(Visit &&visit) {
        visit("prefix", prefix, 0);
    }

    void checkShapes(Shapes in) const { expectEqual(in[1][0], in[0][0], "images of map"); }

    std::array<int64_t, 3> shape(Shapes in) const { return {in[0][0], in[1][1], in[0][2]}; }

    void run(Launch const &call) const {
        auto const *d = call.shapes[0];
        algm_unmerge_params const p{d[0], d[1], d[2], call.shapes[1][1], prefix, call.dtype};
        call.done(call.kernels.unmerge(&p, call.inputs[0], call.in<int64_t>(1), call.outputs[0], call.stream),
                  "giving every patch its token");
    }
};

// scores (B,S,K), map (B,N) -> labels (B,H,W), of the kernels' label type LABELS.
template <int32_t LABELS>
struct LabelMap {
    static constexpr char const *kName = "label_map";
    static constexpr bool kMerges = false;
    static constexpr std::array<Port, 2> kInputs{{{"scores", Type::kTokens, 3}, {"map", Type::kIndex, 2}}};
    static constexpr std::array<Port, 1> kOutputs{{{"labels", Type::kLabels, 3}}};

    int32_t prefix{}, grid[2]{}, size[2]{};

    template <class Visit>
    void attributes(Visit &&visit) {
        visit("prefix", prefix, 0);
        visit("grid", grid, 1);
        visit("size", size, 1);
    }

    void checkShapes(Shapes in) const {
        expectEqual(in[1][0], in[0][0], "images of map");
        expectEqual(in[1][1], int64_t{grid[0]} * grid[1], "patches of map (grid)");
    }

    std::array<int64_t, 3> shape(Shapes in) const { return {in[0][0], size[0], size[1]}; }

    static constexpr char const *kDoing = "labelling pixels";

    void run(Launch const &call) const {
        auto const p = params(call, call.shapes[0][0], 0, size[0]);
        call.done(call.kernels.labelMap(&p, call.inputs[0], call.in<int64_t>(1), call.outputs[0], call.stream), kDoing);
    }

    // The status of `count` lines of one image from `first` on, in the host's memory.
    int runPart(Launch const &call, int64_t image, int64_t first, int64_t count) const {
        auto const p = params(call, 1, first, count);
        int64_t const bytes = p.dtype == ALGM_FLOAT32 ? 4 : 2, pixel = LABELS == ALGM_LABEL_UINT8 ? 1 : 4;
        return call.kernels.labelMap(&p, call.in<char>(0) + image * p.rows * p.classes * bytes,
                                     call.in<int64_t>(1) + image * p.grid_h * p.grid_w,
                                     call.out<char>(0) + (image * p.height + first) * p.width * pixel, call.stream);
    }

private:
    algm_label_map_params params(Launch const &call, int64_t images, int64_t first, int64_t lines) const {
        auto const *d = call.shapes[0];
        return {images, d[1], d[2], grid[0], grid[1], size[0], size[1], first, lines, prefix, call.dtype, LABELS};
    }
};

// value (B,M,H,D), locations (B,Q,H,L,P,2), shares (B,Q,H,L,P) -> (B,Q,H*D).
struct DeformableAttention {
    static constexpr char const *kName = "deformable_attention";
    static constexpr bool kMerges = false;
    static constexpr std::array<Port, 3> kInputs{
        {{"value", Type::kTokens, 4}, {"locations", Type::kFloat, 6}, {"shares", Type::kFloat, 5}}};
    static constexpr std::array<Port, 1> kOutputs{{{"values", Type::kTokens, 3}}};

    Numbers shapes{};  // rows and columns of each level

    template <class Visit>
    void attributes(Visit &&visit) {
        visit("shapes", shapes, 1);
    }

    int64_t levels() const { return shapes.count / 2; }

    void checkShapes(Shapes in) const {
        if (shapes.count == 0 || shapes.count % 2 != 0) {
            fail("attribute shapes should hold rows and columns of each level, got ", shapes.count, " numbers");
        }
        int64_t cells = 0;
        for (int32_t i = 0; i < shapes.count; i += 2) {
            cells += int64_t{shapes.value[i]} * shapes.value[i + 1];
        }
        expectEqual(in[0][1], cells, "cells of value (shapes)");
        expectEqual(in[2][0], in[0][0], "images of shares");
        expectEqual(in[2][2], in[0][2], "heads of shares");
        expectEqual(in[2][3], levels(), "levels of shares (shapes)");
        for (int32_t axis = 0; axis < 5; ++axis) {
            expectEqual(in[1][axis], in[2][axis], "a dimension of locations (shares)");
        }
        expectEqual(in[1][5], 2, "coordinates of locations");
    }

    std::array<int64_t, 3> shape(Shapes in) const { return {in[0][0], in[2][1], in[0][2] * in[0][3]}; }

    static constexpr char const *kDoing = "looking at places";

    void run(Launch const &call) const {
        auto const p = params(call, call.shapes[0][0], call.shapes[2][1]);
        call.done(call.kernels.deformableAttention(&p, call.inputs[0], call.in<float>(1), call.in<float>(2),
                                                   call.outputs[0], call.stream),
                  kDoing);
    }

    // The status of `count` queries of one image from `first` on, in the host's memory.
    int runPart(Launch const &call, int64_t image, int64_t first, int64_t count) const {
        auto const p = params(call, 1, count);
        int64_t const bytes = p.dtype == ALGM_FLOAT32 ? 4 : 2, row = p.heads * p.width * bytes;
        int64_t const place = (image * call.shapes[2][1] + first) * p.heads * p.levels * p.points;
        return call.kernels.deformableAttention(
            &p, call.in<char>(0) + image * p.cells * row, call.in<float>(1) + 2 * place, call.in<float>(2) + place,
            call.out<char>(0) + (image * call.shapes[2][1] + first) * row, call.stream);
    }

private:
    algm_deformable_attention_params params(Launch const &call, int64_t images, int64_t queries) const {
        auto const *d = call.shapes[0];
        algm_deformable_attention_params p{images,   d[1], d[2],      d[3], queries,
                                           levels(), call.shapes[2][4], {},   call.dtype};
        std::copy_n(shapes.value, shapes.count, p.sides);
        return p;
    }
};

}  // namespace algm

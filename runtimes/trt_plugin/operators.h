// The four operators as TensorRT plugins: ports, attributes, shapes, launches. Semantics are in ../kernels.
#pragma once

#include "plugin.h"

namespace algm {

// Throws unless both numbers agree; -1 stands for one that is not known yet.
inline void expectEqual(int64_t got, int64_t expected, char const *what) {
    if (got != expected && got >= 0 && expected >= 0) {
        fail(what, " should be ", expected, ", got ", got);
    }
}

// Throws unless low <= value <= high; `what` names the attribute.
inline void expectWithin(int32_t value, int32_t low, int32_t high, char const *what) {
    if (value < low || value > high) {
        fail("attribute ", what, " should lie in ", low, " to ", high, ", got ", value);
    }
}

inline constexpr int32_t kMaxAttribute = 1 << 24;

// tokens (B,S,D), size (B,S), threshold () -> tokens (B,S',D), size (B,S'), map (B,N), length (B), rows () = S'.
struct Clap {
    static constexpr char const *kName = "clap";
    static constexpr std::array<Port, 3> kInputs{
        {{"tokens", Type::kTokens, 3}, {"size", Type::kFloat, 2}, {"threshold", Type::kFloat, 0}}};
    static constexpr std::array<Port, 5> kOutputs{{{"tokens", Type::kTokens, 3},
                                                   {"size", Type::kFloat, 2},
                                                   {"map", Type::kIndex, 2},
                                                   {"length", Type::kIndex, 1},
                                                   {"rows", Type::kIndex, 0}}};

    int32_t grid[2]{};
    int32_t window[2]{};
    int32_t prefix{};
    int32_t semantics{};
    int32_t batch{};
    int32_t order{};

    template <class Visit>
    void fields(Visit &&visit) {
        visit("grid", grid);
        visit("window", window);
        visit("prefix", prefix);
        visit("semantics", semantics);
        visit("batch", batch);
        visit("order", order);
    }

    void checkAttributes() const;
    void checkShapes(nvinfer1::Dims const *inputs) const;
    void shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const;
    size_t workspace(nvinfer1::Dims const *inputs, int32_t dtype) const;
    void run(Launch const &launch) const;

private:
    algm_clap_params params(nvinfer1::Dims const *inputs, int32_t dtype) const;
};

// tokens (B,S,D), size (B,S), map (B,N), length (B), threshold ()
//   -> tokens (B,S'',D), size (B,S''), map (B,N), length (B), rows () = S''.
struct Gbm {
    static constexpr char const *kName = "gbm";
    static constexpr std::array<Port, 5> kInputs{{{"tokens", Type::kTokens, 3},
                                                  {"size", Type::kFloat, 2},
                                                  {"map", Type::kIndex, 2},
                                                  {"length", Type::kIndex, 1},
                                                  {"threshold", Type::kFloat, 0}}};
    static constexpr std::array<Port, 5> kOutputs = Clap::kOutputs;

    int32_t prefix{};
    int32_t mode{};
    float divisor{};
    int32_t semantics{};
    int32_t batch{};

    template <class Visit>
    void fields(Visit &&visit) {
        visit("prefix", prefix);
        visit("mode", mode);
        visit("divisor", divisor);
        visit("semantics", semantics);
        visit("batch", batch);
    }

    void checkAttributes() const;
    void checkShapes(nvinfer1::Dims const *inputs) const;
    void shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const;
    size_t workspace(nvinfer1::Dims const *inputs, int32_t dtype) const;
    void run(Launch const &launch) const;

private:
    algm_gbm_params params(nvinfer1::Dims const *inputs, int32_t dtype) const;
};

// values (B,S,C), map (B,N) -> (B,N,C).
struct Unmerge {
    static constexpr char const *kName = "unmerge";
    static constexpr std::array<Port, 2> kInputs{{{"values", Type::kTokens, 3}, {"map", Type::kIndex, 2}}};
    static constexpr std::array<Port, 1> kOutputs{{{"values", Type::kTokens, 3}}};

    int32_t prefix{};

    template <class Visit>
    void fields(Visit &&visit) {
        visit("prefix", prefix);
    }

    void checkAttributes() const;
    void checkShapes(nvinfer1::Dims const *inputs) const;
    void shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const;
    size_t workspace(nvinfer1::Dims const *, int32_t) const { return 0; }
    void run(Launch const &launch) const;
};

// scores (B,S,K), map (B,N) -> labels (B,H,W) int32; TensorRT takes no 8-bit plugin output, the graph casts.
struct LabelMap {
    static constexpr char const *kName = "label_map";
    static constexpr std::array<Port, 2> kInputs{{{"scores", Type::kTokens, 3}, {"map", Type::kIndex, 2}}};
    static constexpr std::array<Port, 1> kOutputs{{{"labels", Type::kLabels, 3}}};

    int32_t prefix{};
    int32_t grid[2]{};
    int32_t size[2]{};

    template <class Visit>
    void fields(Visit &&visit) {
        visit("prefix", prefix);
        visit("grid", grid);
        visit("size", size);
    }

    void checkAttributes() const;
    void checkShapes(nvinfer1::Dims const *inputs) const;
    void shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const;
    size_t workspace(nvinfer1::Dims const *, int32_t) const { return 0; }
    void run(Launch const &launch) const;
};

}  // namespace algm

// The operators as ONNX Runtime sees them: types, attributes, calls. Semantics are in ../kernels.
#pragma once

#include "call.h"

namespace algm {

// Type of a port; `kTokens` is whatever type the node's token values have.
inline constexpr auto kTokens = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
inline constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
inline constexpr auto kIndex = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
inline constexpr auto kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
inline constexpr auto kLabel = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
inline constexpr auto kBytes = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;

struct Clap {
    static constexpr char const* kName = "clap";
    static constexpr ONNXTensorElementDataType kInputs[] = {kTokens, kFloat, kFloat};
    static constexpr ONNXTensorElementDataType kOutputs[] = {kTokens, kFloat, kIndex, kIndex};

    explicit Clap(Attributes const& attributes);
    void run(Call const& call) const { merge(call, false); }

protected:
    void merge(Call const& call, bool padded) const;

private:
    int64_t grid_[2], window_[2], prefix_;
    int32_t semantics_, batch_, order_;
};

// As many rows come out as went in, those behind an image's length zero. So every size is known beforehand, nothing
// waits for the device, and a CUDA graph can hold it. Two more outputs: the row count S', and the plan, scratch memory.
struct PaddedClap : Clap {
    static constexpr char const* kName = "padded_clap";
    static constexpr ONNXTensorElementDataType kOutputs[] = {kTokens, kFloat, kIndex, kIndex, kIndex, kBytes};

    using Clap::Clap;
    void run(Call const& call) const { merge(call, true); }
};

struct Gbm {
    static constexpr char const* kName = "gbm";
    static constexpr ONNXTensorElementDataType kInputs[] = {kTokens, kFloat, kIndex, kIndex, kFloat};
    static constexpr ONNXTensorElementDataType kOutputs[] = {kTokens, kFloat, kIndex, kIndex};

    explicit Gbm(Attributes const& attributes);
    void run(Call const& call) const { merge(call, false); }

protected:
    void merge(Call const& call, bool padded) const;

private:
    int64_t prefix_;
    double divisor_;
    int32_t mode_, semantics_, batch_;
};

// What PaddedClap is to Clap.
struct PaddedGbm : Gbm {
    static constexpr char const* kName = "padded_gbm";
    static constexpr ONNXTensorElementDataType kOutputs[] = {kTokens, kFloat, kIndex, kIndex, kIndex, kBytes};

    using Gbm::Gbm;
    void run(Call const& call) const { merge(call, true); }
};

// Where valid and padded rows of images that lie one behind the other start, the end included: image b's at b * rows and
// b * rows + length[b]. Attention over packed sequences takes them for 2 B sequences, half of them padding. Of the tokens
// only the shape is read.
struct SequenceStarts {
    static constexpr char const* kName = "sequence_starts";
    static constexpr ONNXTensorElementDataType kInputs[] = {kIndex, kTokens};
    static constexpr ONNXTensorElementDataType kOutputs[] = {kInt32};

    explicit SequenceStarts(Attributes const&) {}
    void run(Call const& call) const;
};

struct Unmerge {
    static constexpr char const* kName = "unmerge";
    static constexpr ONNXTensorElementDataType kInputs[] = {kTokens, kIndex};
    static constexpr ONNXTensorElementDataType kOutputs[] = {kTokens};

    explicit Unmerge(Attributes const& attributes) : prefix_(attributes.integer("prefix")) {}
    void run(Call const& call) const;

private:
    int64_t prefix_;
};

// 8-bit labels, for up to 255 classes; graphs with more keep the function body.
struct LabelMap {
    static constexpr char const* kName = "label_map";
    static constexpr ONNXTensorElementDataType kInputs[] = {kTokens, kIndex};
    static constexpr ONNXTensorElementDataType kOutputs[] = {kLabel};

    explicit LabelMap(Attributes const& attributes);
    void run(Call const& call) const;

private:
    int64_t prefix_, grid_[2], size_[2];
};

}  // namespace algm

// The operators as ONNX Runtime sees them. Attributes, inputs, outputs and calls are in ../shell.h.
#pragma once

#include <interpolation.hpp>

#include <atomic>

#include "call.h"

namespace algm {

// What ONNX Runtime calls a type; `undefined` stands for whatever type the node's token values have.
constexpr ONNXTensorElementDataType typeOf(Type type) {
    switch (type) {
        case Type::kTokens: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        case Type::kFloat: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
        case Type::kIndex: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
        case Type::kLabels: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    }
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

// An operator with the attributes of one node.
template <class Operator>
class Node {
public:
    static constexpr char const* kName = Operator::kName;
    static constexpr size_t kInputCount = Operator::kInputs.size(), kOutputCount = Operator::kOutputs.size();
    static constexpr size_t kRequiredCount = kInputCount, kTokenInputs = 1;

    static ONNXTensorElementDataType inputType(size_t index) { return typeOf(Operator::kInputs[index].type); }
    static ONNXTensorElementDataType outputType(size_t index) { return typeOf(Operator::kOutputs[index].type); }

    explicit Node(ReadAttribute const& read) { operator_.attributes(read); }

    void run(Call const& call) const {
        Inputs const in(call, operator_);
        auto const shape = operator_.shape(in.shapes.data());
        void* outputs[]{call.output(0, {shape.begin(), shape.end()})};
        operator_.run(in.launch(call, outputs));
    }

protected:
    struct Inputs {
        Inputs(Call const& call, Operator const& op) {
            for (size_t i = 0; i < kInputCount; ++i) {
                tensors[i] = call.input(i, Operator::kInputs[i].rank);
                shapes[i] = tensors[i].shape.data();
                data[i] = tensors[i].data;
            }
            op.checkShapes(shapes.data());
        }

        Launch launch(Call const& call, void* const* outputs) const {
            return {call.backend.kernels, shapes.data(), tensors[0].dtype(), data.data(), outputs, call.stream};
        }

        std::array<Tensor, kInputCount> tensors;
        std::array<int64_t const*, kInputCount> shapes;
        std::array<void const*, kInputCount> data;
    };

    Operator operator_{};
};

// Does `work(image, first, count)`, which returns a status, for all of `total` things of every image, no more than `count`
// at once, on the threads of the session. Returns a status that is not ALGM_OK if there is one.
template <class Work>
int onThreads(Call const& call, int64_t images, int64_t total, int64_t count, Work work) {
    int64_t const parts = (total + count - 1) / count;
    std::atomic<int> failed{ALGM_OK};
    auto one = [&](size_t part) {
        int64_t const image = static_cast<int64_t>(part) / parts, first = static_cast<int64_t>(part) % parts * count;
        int const status = work(image, first, std::min(count, total - first));
        if (status != ALGM_OK) {
            failed = status;
        }
    };
    call.forEach(static_cast<size_t>(images * parts), one);
    return failed;
}

// Does `label(image, first, lines)` likewise for all lines of every picture, which a grid of so many rows of cells is
// stretched over. A part is whole rows of cells, so that a kernel sorts a cell's classes once.
template <class Label>
int onLines(Call const& call, int64_t images, int64_t cells, int64_t lines, Label label) {
    constexpr int64_t kLines = 16;  // in a part, or one row of cells where that is more
    Axis const down(cells, lines);
    auto const row = [&](int64_t index) { return int64_t{down.first_pixel(static_cast<int32_t>(index) - 1)}; };
    int64_t const count = std::max<int64_t>(1, kLines * cells / lines);
    return onThreads(call, images, cells + 1, count, [&](int64_t image, int64_t index, int64_t rows) {
        int64_t const first = row(index), end = row(index + rows);
        return first < end ? label(image, first, end - first) : ALGM_OK;
    });
}

// An operator whose work the threads of the session share on the CPU.
template <class Operator>
struct Shared : Node<Operator> {
    using Node<Operator>::Node;

    void run(Call const& call) const {
        typename Node<Operator>::Inputs const in(call, this->operator_);
        auto const shape = this->operator_.shape(in.shapes.data());
        void* outputs[]{call.output(0, {shape.begin(), shape.end()})};
        if (shape[0] == 0) {
            return;  // the kernels take at least one image
        }
        Launch const launch = in.launch(call, outputs);
        if (call.backend.wait != nullptr) {
            this->operator_.run(launch);
        } else {
            launch.done(share(call, launch, this->operator_, shape), Operator::kDoing);
        }
    }

private:
    static int share(Call const& call, Launch const& launch, DeformableAttention const& op,
                     std::array<int64_t, 3> const& shape) {
        constexpr int64_t kQueries = 64;
        return onThreads(call, shape[0], shape[1], kQueries, [&](int64_t image, int64_t first, int64_t count) {
            return op.runPart(launch, image, first, count);
        });
    }

    static int share(Call const& call, Launch const& launch, LabelMap<ALGM_LABEL_UINT8> const& op,
                     std::array<int64_t, 3> const& shape) {
        return onLines(call, shape[0], op.grid[0], shape[1], [&](int64_t image, int64_t first, int64_t lines) {
            return op.runPart(launch, image, first, lines);
        });
    }
};

// A merge. The number of rows is known when it is decided, and is no output.
template <class Operator>
struct Merge : Node<Operator> {
    static constexpr size_t kOutputCount = 4;

    using Node<Operator>::Node;

    void run(Call const& call) const {
        typename Node<Operator>::Inputs const in(call, this->operator_);
        auto const plan = call.backend.scratch(planBytes(call, in), call.stream);
        merge(call, in, call.backend.hostCount(), plan.get(), [&](int64_t const* counted) {
            if (call.backend.wait != nullptr) {
                call.backend.wait(call.stream);
            }
            return *counted;
        });
    }

protected:
    template <class Inputs>
    size_t planBytes(Call const& call, Inputs const& in) const {
        return this->operator_.workspace(call.backend.kernels, in.shapes.data(), in.tensors[0].dtype());
    }

    // Decides, asks `rowsOf` how many rows the outputs shall have, and moves them there: an image every so many rows, or, by
    // a `step`, every so many as the longest image has, rounded up to it.
    template <class Inputs, class RowsOf>
    void merge(Call const& call, Inputs const& in, int64_t* count, void* plan, RowsOf rowsOf, int64_t step = 0) const {
        auto const& op = this->operator_;
        int64_t const images = in.shapes[0][0], width = in.shapes[0][2];
        void* outputs[]{nullptr, nullptr, call.output(2, {images, op.patches(in.shapes.data())}),
                        call.output(3, {images}), count};
        Launch const launch = in.launch(call, outputs);
        op.decide(launch, plan);
        int64_t const rows = rowsOf(count);
        outputs[0] = call.output(0, {images, rows, width});
        outputs[1] = call.output(1, {images, rows});
        op.apply(launch, plan, step > 0 ? -step : rows);
    }
};

// As many rows come out as went in, those behind an image's length zero, or, by the rule `budget`, as many as every image
// keeps. So every size is known beforehand, nothing waits for the device, and a CUDA graph can hold it. Two more outputs:
// the row count S', and the plan, scratch memory.
template <class Operator>
struct PaddedMerge : Merge<Operator> {
    static constexpr char const* kName = std::is_same_v<Operator, Clap> ? "padded_clap" : "padded_gbm";
    static constexpr size_t kOutputCount = 6;

    static ONNXTensorElementDataType outputType(size_t index) {
        return index == 5 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : Node<Operator>::outputType(index);
    }

    using Merge<Operator>::Merge;

    void run(Call const& call) const { padded(call, 0); }

protected:
    void padded(Call const& call, int64_t step) const {
        typename Node<Operator>::Inputs const in(call, this->operator_);
        void* plan = call.output(5, {static_cast<int64_t>(this->planBytes(call, in))});
        auto* count = static_cast<int64_t*>(call.output(4, {}));
        auto const most = [&](int64_t const*) { return this->operator_.mostRows(in.shapes.data()); };
        this->merge(call, in, count, plan, most, step);
    }
};

// The same with the rows laid out as (B, S' rounded up to a multiple of `step`, D), at the front of outputs that have room
// for all that went in. Whoever has read S' finds a tensor of that size there, and nothing has to move. Ragged results
// count the rows of all images, and their mean stands for S'.
template <class Operator>
struct BucketedMerge : PaddedMerge<Operator> {
    static constexpr char const* kName = std::is_same_v<Operator, Clap> ? "bucketed_clap" : "bucketed_gbm";

    explicit BucketedMerge(ReadAttribute const& read) : PaddedMerge<Operator>(read) {
        read("step", step_, 1);
        if (read.has("ragged")) {  // graphs of earlier versions have no ragged rows
            read("ragged", this->operator_.ragged, kRagged);
        }
    }

    void run(Call const& call) const { this->padded(call, step_); }

private:
    int32_t step_{};
};

// What operators on token values share that no other runtime has. TYPES: of the inputs behind the tokens.
template <Type... TYPES>
struct OnTokens {
    static constexpr size_t kInputCount = 1 + sizeof...(TYPES), kRequiredCount = kInputCount, kOutputCount = 1;
    static constexpr size_t kTokenInputs = 1 + ((TYPES == Type::kTokens ? 1 : 0) + ... + 0);

    static ONNXTensorElementDataType inputType(size_t index) {
        constexpr Type types[]{Type::kTokens, TYPES...};
        return typeOf(types[index]);
    }
    static ONNXTensorElementDataType outputType(size_t) { return typeOf(Type::kTokens); }

protected:
    static void done(Call const& call, int status, char const* what) {
        if (status != ALGM_OK) {
            fail(what, ": ", call.backend.kernels.statusText(status));
        }
    }
};

// product (B,S,3D), bias (3D) in fp32, length (B) or none -> (B,S,D). RAGGED: rows are, and lengths must be there.
template <bool RAGGED>
struct Attention : OnTokens<Type::kFloat, Type::kIndex> {
    static constexpr char const* kName = RAGGED ? "ragged_attention" : "packed_attention";
    static constexpr size_t kRequiredCount = RAGGED ? 3 : 2;

    explicit Attention(ReadAttribute const& read) {
        read("heads", heads_, 1);
        read("scale", scale_);
    }

    void run(Call const& call) const {
        Tensor const product = call.input(0, 3), bias = call.input(1, 1);
        int64_t const images = product.shape[0], rows = product.shape[1], width = product.shape[2];
        int64_t const* length = nullptr;
        if (call.has(2)) {
            Tensor const told = call.input(2, 1);
            expectEqual(told.shape[0], images, "images of length");
            length = static_cast<int64_t const*>(told.data);
        }
        if (width % (3 * int64_t{heads_}) != 0) {
            fail("the last axis of product should hold queries, keys and values of ", heads_, " heads, got ", width);
        }
        expectEqual(bias.shape[0], width, "values of bias");
        algm_attention_params const p{images, rows, heads_, width / (3 * heads_), scale_, product.dtype(),
                                      RAGGED};
        done(call,
             call.backend.kernels.attention(&p, product.data, static_cast<float const*>(bias.data), length,
                                            call.output(0, {images, rows, width / 3}), call.stream),
             "attending");
    }

private:
    int32_t heads_{};
    float scale_{};
};

// Ragged values (B,S,C), length (B), front (F,C) in fp32 -> ragged (B, S - skip + F, C).
struct Reframe : OnTokens<Type::kIndex, Type::kFloat> {
    static constexpr char const* kName = "reframe";

    explicit Reframe(ReadAttribute const& read) { read("skip", skip_, 0); }

    void run(Call const& call) const {
        Tensor const values = call.input(0, 3), length = call.input(1, 1), front = call.input(2, 2);
        int64_t const images = values.shape[0], rows = values.shape[1], width = values.shape[2], put = front.shape[0];
        expectEqual(length.shape[0], images, "images of length");
        expectEqual(front.shape[1], width, "values of a row of front");
        algm_reframe_params const p{images, rows, width, skip_, put, values.dtype()};
        done(call,
             call.backend.kernels.reframe(&p, values.data, static_cast<int64_t const*>(length.data),
                                          static_cast<float const*>(front.data),
                                          call.output(0, {images, rows - skip_ + put, width}), call.stream),
             "exchanging leading rows");
    }

private:
    int32_t skip_{};
};

// Ragged values (B,S,C), length (B) -> (B,count,C).
struct Apart : OnTokens<Type::kIndex> {
    static constexpr char const* kName = "apart";

    explicit Apart(ReadAttribute const& read) {
        read("first", first_, 0);
        read("count", count_, 1);
    }

    void run(Call const& call) const {
        Tensor const values = call.input(0, 3), length = call.input(1, 1);
        int64_t const images = values.shape[0], width = values.shape[2];
        expectEqual(length.shape[0], images, "images of length");
        algm_apart_params const p{images, values.shape[1], width, first_, count_, values.dtype()};
        done(call,
             call.backend.kernels.apart(&p, values.data, static_cast<int64_t const*>(length.data),
                                        call.output(0, {images, count_, width}), call.stream),
             "taking images apart");
    }

private:
    int32_t first_{}, count_{};
};

// product (B,S,C), bias (C) in fp32 -> GELU of their sum.
struct Gelu : OnTokens<Type::kFloat> {
    static constexpr char const* kName = "gelu";

    explicit Gelu(ReadAttribute const&) {}

    void run(Call const& call) const {
        Tensor const product = call.input(0, 3), bias = call.input(1, 1);
        expectEqual(bias.shape[0], product.shape[2], "values of bias");
        algm_gelu_params const p{product.shape[0] * product.shape[1], product.shape[2], product.dtype()};
        done(call,
             call.backend.kernels.gelu(&p, product.data, static_cast<float const*>(bias.data),
                                       call.output(0, product.shape), call.stream),
             "computing GELU");
    }
};

// An input of `width` values in fp32.
inline float const* parameters(Call const& call, size_t index, int64_t width, char const* what) {
    Tensor const found = call.input(index, 1);
    expectEqual(found.shape[0], width, what);
    return static_cast<float const*>(found.data);
}

// A residual of a product's shape.
inline void const* residualOf(Call const& call, size_t index, std::vector<int64_t> const& shape) {
    Tensor const residual = call.input(index, 3);
    for (size_t axis = 0; axis < 3; ++axis) {
        expectEqual(residual.shape[axis], shape[axis], "a dimension of residual (product)");
    }
    return residual.data;
}

// product (B,S,D), bias (D) in fp32, residual (B,S,D) -> total (B,S,D).
struct BiasSkip : OnTokens<Type::kFloat, Type::kTokens> {
    static constexpr char const* kName = "bias_skip";

    explicit BiasSkip(ReadAttribute const&) {}

    void run(Call const& call) const {
        Tensor const product = call.input(0, 3);
        auto const& shape = product.shape;
        auto const* residual = residualOf(call, 2, shape);
        float const* bias = parameters(call, 1, shape[2], "values of bias");
        algm_bias_skip_norm_params const p{shape[0] * shape[1], shape[2], 0, product.dtype()};
        done(call,
             call.backend.kernels.biasSkipNorm(&p, product.data, bias, residual, nullptr, nullptr, nullptr,
                                                call.output(0, shape), call.stream),
             "adding a residual");
    }
};

// x (B,S,D), weight (D) and shift (D) in fp32 -> normed (B,S,D).
struct LayerNorm : OnTokens<Type::kFloat, Type::kFloat> {
    static constexpr char const* kName = "layer_norm";

    explicit LayerNorm(ReadAttribute const& read) { read("epsilon", epsilon_); }

    void run(Call const& call) const {
        Tensor const x = call.input(0, 3);
        auto const& shape = x.shape;
        float const *weight = parameters(call, 1, shape[2], "values of weight"),
                    *shift = parameters(call, 2, shape[2], "values of shift");
        algm_bias_skip_norm_params const p{shape[0] * shape[1], shape[2], epsilon_, x.dtype()};
        done(call,
             call.backend.kernels.biasSkipNorm(&p, x.data, nullptr, nullptr, weight, shift, call.output(0, shape),
                                                nullptr, call.stream),
             "normalising");
    }

private:
    float epsilon_{};
};

// product (B,S,D), bias (D) in fp32, residual (B,S,D), weight (D) and shift (D) in fp32 -> normed (B,S,D), total (B,S,D).
struct BiasSkipNorm : OnTokens<Type::kFloat, Type::kTokens, Type::kFloat, Type::kFloat> {
    static constexpr char const* kName = "bias_skip_norm";
    static constexpr size_t kOutputCount = 2;

    explicit BiasSkipNorm(ReadAttribute const& read) { read("epsilon", epsilon_); }

    void run(Call const& call) const {
        Tensor const product = call.input(0, 3);
        auto const& shape = product.shape;
        auto const* residual = residualOf(call, 2, shape);
        float const *bias = parameters(call, 1, shape[2], "values of bias"),
                    *weight = parameters(call, 3, shape[2], "values of weight"),
                    *shift = parameters(call, 4, shape[2], "values of shift");
        algm_bias_skip_norm_params const p{shape[0] * shape[1], shape[2], epsilon_, product.dtype()};
        void *normed = call.output(0, shape), *total = call.output(1, shape);
        done(call,
             call.backend.kernels.biasSkipNorm(&p, product.data, bias, residual, weight, shift, normed, total,
                                                call.stream),
             "normalising");
    }

private:
    float epsilon_{};
};

// image (B,3,H,W) -> (B,N,3*side*side).
struct Patches : OnTokens<> {
    static constexpr char const* kName = "patches";

    explicit Patches(ReadAttribute const& read) {
        read("side", side_, 1);
        read("centre", centre_);
        read("scale", scale_);
    }

    void run(Call const& call) const {
        Tensor const image = call.input(0, 4);
        auto const& shape = image.shape;
        expectEqual(shape[1], kChannels, "channels of image");
        if (shape[2] % side_ != 0 || shape[3] % side_ != 0) {
            fail("the sides of image should be multiples of ", side_, ", got ", shape[2], " and ", shape[3]);
        }
        algm_patches_params const p{shape[0], shape[2], shape[3], side_, centre_, scale_, image.dtype()};
        int64_t const count = shape[2] / side_ * (shape[3] / side_);
        done(call,
             call.backend.kernels.patches(&p, image.data, call.output(0, {shape[0], count, kChannels * side_ * side_}),
                                          call.stream),
             "cutting patches");
    }

private:
    int32_t side_{};
    float centre_{}, scale_{};
};

// masks (B,Q,h,w), classes (B,Q,K) in fp32 -> 8-bit labels (B,H,W). On the CPU lines are shared among the session's threads.
struct MaskLabels : OnTokens<Type::kFloat> {
    static constexpr char const* kName = "mask_labels";

    static ONNXTensorElementDataType outputType(size_t) { return typeOf(Type::kLabels); }

    explicit MaskLabels(ReadAttribute const& read) { read("size", size_, 1); }

    void run(Call const& call) const {
        Tensor const masks = call.input(0, 4), classes = call.input(1, 3);
        auto const& m = masks.shape;
        expectEqual(classes.shape[0], m[0], "images of classes");
        expectEqual(classes.shape[1], m[1], "queries of classes");
        if (classes.shape[2] > kMostClasses) {
            fail("8-bit labels hold ", kMostClasses, " classes, got ", classes.shape[2]);
        }
        algm_mask_labels_params const p{m[0],     m[1], classes.shape[2], m[2], m[3], size_[0], size_[1], 0,
                                        size_[0], masks.dtype(), ALGM_LABEL_UINT8};
        auto* const labels = static_cast<uint8_t*>(call.output(0, {m[0], size_[0], size_[1]}));
        if (m[0] == 0) {
            return;  // the kernels label at least one image
        }
        auto const* shares = static_cast<float const*>(classes.data);
        int const status = call.backend.wait != nullptr
                               ? call.backend.kernels.maskLabels(&p, masks.data, shares, labels, call.stream)
                               : share(call, p, static_cast<char const*>(masks.data), shares, labels);
        done(call, status, "labelling pixels by masks");
    }

private:
    static constexpr int64_t kMostClasses = 255;

    static int share(Call const& call, algm_mask_labels_params const& whole, char const* masks, float const* classes,
                     uint8_t* labels) {
        if (int const status = check(&whole)) {
            return status;  // such as masks without cells, among which no lines can be shared out
        }
        int64_t const bytes = whole.queries * whole.grid_h * whole.grid_w * dtype_bytes(whole.dtype);
        auto const label = [&](int64_t image, int64_t first, int64_t lines) {
            algm_mask_labels_params p = whole;
            p.batch = 1;
            p.first = first;
            p.lines = lines;
            return call.backend.kernels.maskLabels(&p, masks + image * bytes,
                                                   classes + image * whole.queries * whole.classes,
                                                   labels + (image * whole.height + first) * whole.width, nullptr);
        };
        return onLines(call, whole.batch, whole.grid_h, whole.height, label);
    }

    int32_t size_[2]{};
};

// 8-bit labels, for up to 255 classes; graphs with more keep the function body.
using Labels = Shared<LabelMap<ALGM_LABEL_UINT8>>;

using Looking = Shared<DeformableAttention>;

}  // namespace algm

#include "operators.h"

#include <cstring>

namespace algm {

// --- attributes and tensors

int64_t Attributes::integer(char const* name) const {
    int64_t value{};
    check(api_, api_.KernelInfoGetAttribute_int64(info_, name, &value));
    return value;
}

float Attributes::real(char const* name) const {
    float value{};
    check(api_, api_.KernelInfoGetAttribute_float(info_, name, &value));
    return value;
}

void Attributes::pair(char const* name, int64_t (&values)[2]) const {
    size_t count = 0;
    check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &count));
    if (count != 2) {
        fail("attribute ", name, " should hold two numbers, got ", count);
    }
    check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, values, &count));
}

int32_t Attributes::choice(char const* name, std::initializer_list<char const*> names) const {
    size_t size = 0;
    check(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size));
    std::string text(size, '\0');
    check(api_, api_.KernelInfoGetAttribute_string(info_, name, text.data(), &size));
    int32_t place = 0;
    for (char const* known : names) {
        if (std::strcmp(text.c_str(), known) == 0) {
            return place;
        }
        ++place;
    }
    fail("attribute ", name, " has the unknown value ", text.c_str());
}

int32_t Tensor::dtype() const {
    switch (type) {
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return ALGM_FLOAT32;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return ALGM_FLOAT16;
        case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: return ALGM_BFLOAT16;
        default: fail("token values should be float, float16 or bfloat16, got ONNX type ", int{type});
    }
}

Call::Call(OrtApi const& api, OrtKernelContext* context, Backend const& backend)
    : kernels(backend), api_(api), context_(context) {
    if (backend.wait != nullptr) {
        check(api_, api_.KernelContext_GetGPUComputeStream(context_, &stream));
    }
}

Tensor Call::input(size_t index, size_t rank) const {
    OrtValue const* value{};
    check(api_, api_.KernelContext_GetInput(context_, index, &value));
    OrtTensorTypeAndShapeInfo* raw{};
    check(api_, api_.GetTensorTypeAndShape(value, &raw));
    std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api_.ReleaseTensorTypeAndShapeInfo)> info(
        raw, api_.ReleaseTensorTypeAndShapeInfo);
    Tensor tensor;
    size_t found = 0;
    check(api_, api_.GetDimensionsCount(info.get(), &found));
    if (found != rank) {
        fail("input ", index, " should have ", rank, " axes, got ", found);
    }
    tensor.shape.resize(rank);
    check(api_, api_.GetDimensions(info.get(), tensor.shape.data(), rank));
    check(api_, api_.GetTensorElementType(info.get(), &tensor.type));
    void* data{};
    check(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    return tensor;
}

void* Call::outputData(size_t index, std::vector<int64_t> const& shape) const {
    OrtValue* value{};
    check(api_, api_.KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
    void* data{};
    check(api_, api_.GetTensorMutableData(value, &data));
    return data;
}

void Call::done(int status, char const* what) const {
    if (status != ALGM_OK) {
        fail(what, ": ", kernels.statusText(status));
    }
}

namespace {

void expect(Tensor const& tensor, std::vector<int64_t> const& shape, char const* what) {
    if (tensor.shape != shape) {
        fail("the shape of ", what, " contradicts the other inputs");
    }
}

// What both merges have in common: where the plan and the row count are, and how many rows come out.
class Merging {
public:
    Merging(Call const& call, bool padded, size_t planBytes) : call_(call), padded_(padded) {
        if (padded) {
            rows_ = call.output<int64_t>(4, {});
            plan_ = call.output(5, {static_cast<int64_t>(planBytes)});
        } else {
            rows_ = call.kernels.hostCount();
            scratch_ = call.scratch(planBytes);
            plan_ = scratch_.get();
        }
    }

    int64_t* rows() const { return rows_; }
    void* plan() const { return plan_; }

    // Rows of the outputs once the merge is decided, of `rowsIn` that went in.
    int64_t rowsOut(int64_t rowsIn) const {
        if (padded_) {
            return rowsIn;
        }
        if (call_.kernels.wait != nullptr) {
            call_.kernels.wait(call_.stream);
        }
        return *rows_;
    }

private:
    Call const& call_;
    bool padded_;
    int64_t* rows_{};
    void* plan_{};
    Scratch scratch_;
};

}  // namespace

// --- clap

Clap::Clap(Attributes const& attributes)
    : prefix_(attributes.integer("prefix")),
      semantics_(attributes.choice("semantics", {"code", "paper"})),
      batch_(attributes.choice("batch", {"per_image", "batch_min"})),
      order_(attributes.choice("order", {"published", "raster"})) {
    attributes.pair("grid", grid_);
    attributes.pair("window", window_);
}

void Clap::merge(Call const& call, bool padded) const {
    Tensor const tokens = call.input(0, 3), size = call.input(1, 2), threshold = call.input(2, 0);
    int64_t const images = tokens.shape[0], rows = tokens.shape[1], width = tokens.shape[2];
    expect(size, {images, rows}, "size");
    algm_clap_params const p{images,     rows,    width,          grid_[0],   grid_[1], window_[0],
                             window_[1], prefix_, tokens.dtype(), semantics_, batch_,   order_};
    Merging const merging(call, padded, call.kernels.clapWorkspace(&p));
    auto* map = call.output<int64_t>(2, {images, grid_[0] * grid_[1]});
    auto* length = call.output<int64_t>(3, {images});
    call.done(call.kernels.clapDecide(&p, tokens.data, threshold.as<float>(), map, length, merging.rows(), nullptr,
                                      merging.plan(), call.stream),
              "deciding which windows merge");
    int64_t const merged = merging.rowsOut(rows);
    call.done(call.kernels.clapApply(&p, tokens.data, size.as<float>(), merging.plan(), merged,
                                     call.output(0, {images, merged, width}),
                                     call.output<float>(1, {images, merged}), call.stream),
              "merging windows");
}

// --- gbm

Gbm::Gbm(Attributes const& attributes)
    : prefix_(attributes.integer("prefix")),
      divisor_(attributes.real("divisor")),
      mode_(attributes.choice("mode", {"adaptive", "fixed"})),
      semantics_(attributes.choice("semantics", {"code", "paper"})),
      batch_(attributes.choice("batch", {"per_image", "batch_min"})) {}

void Gbm::merge(Call const& call, bool padded) const {
    Tensor const tokens = call.input(0, 3), size = call.input(1, 2), map = call.input(2, 2), length = call.input(3, 1),
                 threshold = call.input(4, 0);
    int64_t const images = tokens.shape[0], rows = tokens.shape[1], width = tokens.shape[2], patches = map.shape[1];
    expect(size, {images, rows}, "size");
    expect(map, {images, patches}, "map");
    expect(length, {images}, "length");
    algm_gbm_params const p{images,   rows,           width,      patches, prefix_,
                            divisor_, tokens.dtype(), semantics_, batch_,  mode_};
    Merging const merging(call, padded, call.kernels.gbmWorkspace(&p));
    call.done(call.kernels.gbmDecide(&p, tokens.data, map.as<int64_t>(), length.as<int64_t>(), threshold.as<float>(),
                                     call.output<int64_t>(2, {images, patches}), call.output<int64_t>(3, {images}),
                                     merging.rows(), nullptr, merging.plan(), call.stream),
              "deciding which tokens merge");
    int64_t const merged = merging.rowsOut(rows);
    call.done(call.kernels.gbmApply(&p, tokens.data, size.as<float>(), merging.plan(), merged,
                                    call.output(0, {images, merged, width}), call.output<float>(1, {images, merged}),
                                    call.stream),
              "merging tokens");
}

// --- sequence_starts

void SequenceStarts::run(Call const& call) const {
    Tensor const length = call.input(0, 1), tokens = call.input(1, 3);
    int64_t const images = length.shape[0];
    expect(tokens, {images, tokens.shape[1], tokens.shape[2]}, "tokens");
    auto* starts = call.output<int32_t>(0, {2 * images + 1});
    call.done(call.kernels.sequenceStarts(length.as<int64_t>(), images, tokens.shape[1], starts, call.stream),
              "numbering sequences");
}

// --- unmerge and label_map

void Unmerge::run(Call const& call) const {
    Tensor const values = call.input(0, 3), map = call.input(1, 2);
    int64_t const images = values.shape[0], channels = values.shape[2], patches = map.shape[1];
    expect(map, {images, patches}, "map");
    algm_unmerge_params const p{images, values.shape[1], channels, patches, prefix_, values.dtype()};
    call.done(call.kernels.unmerge(&p, values.data, map.as<int64_t>(), call.output(0, {images, patches, channels}),
                                   call.stream),
              "giving every patch its token");
}

LabelMap::LabelMap(Attributes const& attributes) : prefix_(attributes.integer("prefix")) {
    attributes.pair("grid", grid_);
    attributes.pair("size", size_);
}

void LabelMap::run(Call const& call) const {
    Tensor const scores = call.input(0, 3), map = call.input(1, 2);
    int64_t const images = scores.shape[0], classes = scores.shape[2];
    expect(map, {images, grid_[0] * grid_[1]}, "map");
    algm_label_map_params const p{images,   scores.shape[1], classes, grid_[0],       grid_[1],
                                  size_[0], size_[1],        prefix_, scores.dtype(), ALGM_LABEL_UINT8};
    call.done(call.kernels.labelMap(&p, scores.data, map.as<int64_t>(), call.output(0, {images, size_[0], size_[1]}),
                                    call.stream),
              "labelling pixels");
}

}  // namespace algm

#include "call.h"

#include <cstring>

namespace algm {

void ReadAttribute::operator()(char const* name, int32_t& value, int32_t low) const {
    int64_t found{};
    check(api_, api_.KernelInfoGetAttribute_int64(info_, name, &found));
    value = within(found, low, kMaxAttribute, name);
}

void ReadAttribute::operator()(char const* name, int32_t (&values)[2], int32_t low) const {
    auto const found = numbers(name);
    if (found.size() != 2) {
        fail("attribute ", name, " should hold two numbers, got ", found.size());
    }
    for (size_t i = 0; i < 2; ++i) {
        values[i] = within(found[i], low, kMaxAttribute, name);
    }
}

void ReadAttribute::operator()(char const* name, Numbers& values, int32_t low) const {
    auto const found = numbers(name);
    values.count = Numbers::counted(static_cast<int64_t>(found.size()), name);
    for (int32_t i = 0; i < values.count; ++i) {
        values.value[i] = within(found[i], low, kMaxAttribute, name);
    }
}

std::vector<int64_t> ReadAttribute::numbers(char const* name) const {
    size_t count = 0;
    check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &count));
    std::vector<int64_t> found(count);
    check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, found.data(), &count));
    return found;
}

void ReadAttribute::operator()(char const* name, int32_t& value, Words const& words) const {
    size_t size = 0;
    check(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size));
    std::string text(size, '\0');
    check(api_, api_.KernelInfoGetAttribute_string(info_, name, text.data(), &size));
    for (size_t place = 0; place < words.count; ++place) {
        if (std::strcmp(text.c_str(), words.word[place]) == 0) {
            value = static_cast<int32_t>(place);
            return;
        }
    }
    fail("attribute ", name, " has the unknown value ", text.c_str());
}

bool ReadAttribute::has(char const* name) const {
    size_t size = 0;
    OrtStatus* const status = api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size);
    if (status != nullptr) {
        api_.ReleaseStatus(status);
    }
    return status == nullptr;
}

void ReadAttribute::operator()(char const* name, float& value) const {
    check(api_, api_.KernelInfoGetAttribute_float(info_, name, &value));
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
    : backend(backend), api_(api), context_(context) {
    if (backend.wait != nullptr) {
        check(api_, api_.KernelContext_GetGPUComputeStream(context_, &stream));
        backend.begin(api_, context_, stream);
    }
}

Tensor Call::input(size_t index, int32_t rank) const {
    OrtValue const* value{};
    check(api_, api_.KernelContext_GetInput(context_, index, &value));
    OrtTensorTypeAndShapeInfo* raw{};
    check(api_, api_.GetTensorTypeAndShape(value, &raw));
    std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api_.ReleaseTensorTypeAndShapeInfo)> info(
        raw, api_.ReleaseTensorTypeAndShapeInfo);
    Tensor tensor;
    size_t found = 0;
    check(api_, api_.GetDimensionsCount(info.get(), &found));
    if (found != static_cast<size_t>(rank)) {
        fail("input ", index, " should have ", rank, " axes, got ", found);
    }
    tensor.shape.resize(found);
    check(api_, api_.GetDimensions(info.get(), tensor.shape.data(), found));
    check(api_, api_.GetTensorElementType(info.get(), &tensor.type));
    void* data{};
    check(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    return tensor;
}

bool Call::has(size_t index) const {
    size_t count = 0;
    check(api_, api_.KernelContext_GetInputCount(context_, &count));
    OrtValue const* value{};
    if (index < count) {
        check(api_, api_.KernelContext_GetInput(context_, index, &value));
    }
    return value != nullptr;
}

void* Call::output(size_t index, std::vector<int64_t> const& shape) const {
    OrtValue* value{};
    check(api_, api_.KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
    void* data{};
    check(api_, api_.GetTensorMutableData(value, &data));
    return data;
}

}  // namespace algm

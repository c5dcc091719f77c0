// One call of an operator: ONNX Runtime's C interface with exceptions instead of status pointers.
#pragma once

#include <onnxruntime_c_api.h>

#include <memory>
#include <string>
#include <vector>

#include "../shell.h"

namespace algm {

// The API version of ONNX Runtime 1.18: what the library asks for, whatever runtime has loaded it.
inline constexpr uint32_t kApiVersion = 18;

inline void check(OrtApi const& api, OrtStatus* status) {
    if (status != nullptr) {
        std::string const text = api.GetErrorMessage(status);
        api.ReleaseStatus(status);
        fail(text);
    }
}

struct Release {
    void (*release)(void* memory, void* stream);
    void* stream;
    void operator()(void* memory) const { release(memory, stream); }
};

// Memory for one call; work that is queued on the stream when it is released may still use it.
using Scratch = std::unique_ptr<void, Release>;

// Kernels and memory of one provider.
struct Backend {
    char const* provider;
    Scratch (*scratch)(size_t bytes, void* stream);
    // Where `decide` writes the row count, readable on the host after `wait`.
    int64_t* (*hostCount)();
    void (*wait)(void* stream);
    // Called before an operator's work, for what shall be done beforehand on the stream.
    void (*begin)(OrtApi const& api, OrtKernelContext* context, void* stream);
    Kernels kernels;
};

extern Backend const kCpu;
#ifdef ALGM_WITH_CUDA
extern Backend const kCuda;
#endif

struct Tensor {
    std::vector<int64_t> shape;
    ONNXTensorElementDataType type{};
    void const* data{};

    // The kernels' name for the type of token values.
    int32_t dtype() const;
};

// Reads the attributes of a node while its kernel is made; `Operator::attributes` takes it.
class ReadAttribute {
public:
    ReadAttribute(OrtApi const& api, OrtKernelInfo const* info) : api_(api), info_(info) {}

    void operator()(char const* name, int32_t& value, int32_t low) const;
    void operator()(char const* name, int32_t (&values)[2], int32_t low) const;
    void operator()(char const* name, Numbers& values, int32_t low) const;
    void operator()(char const* name, int32_t& value, Words const& words) const;
    void operator()(char const* name, float& value) const;
    // Whether the node has an attribute, a word.
    bool has(char const* name) const;

private:
    std::vector<int64_t> numbers(char const* name) const;

    OrtApi const& api_;
    OrtKernelInfo const* info_;
};

class Call {
public:
    Call(OrtApi const& api, OrtKernelContext* context, Backend const& backend);

    Tensor input(size_t index, int32_t rank) const;
    // Whether an optional input is there.
    bool has(size_t index) const;
    void* output(size_t index, std::vector<int64_t> const& shape) const;

    // Does `work(part)`, which throws nothing, for each of so many parts, on the threads of the session.
    template <class Work>
    void forEach(size_t parts, Work& work) const {
        auto const one = [](void* all, size_t part) { (*static_cast<Work*>(all))(part); };
        check(api_, api_.KernelContext_ParallelFor(context_, one, parts, 0, &work));
    }

    Backend const& backend;
    void* stream{};

private:
    OrtApi const& api_;
    OrtKernelContext* context_;
};

}  // namespace algm

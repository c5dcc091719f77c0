// One call of an operator: ONNX Runtime's C interface with exceptions instead of status pointers.
#pragma once

#include <algm_kernels.h>
#include <onnxruntime_c_api.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace algm {

// The API version of ONNX Runtime 1.18: what the library asks for, whatever runtime has loaded it.
inline constexpr uint32_t kApiVersion = 18;

template <class... Parts>
[[noreturn]] void fail(Parts const&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

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
    int (*sequenceStarts)(int64_t const* length, int64_t images, int64_t rows, int32_t* starts, void* stream);
    decltype(&algm_cpu_status_text) statusText;
    decltype(&algm_cpu_clap_workspace) clapWorkspace;
    decltype(&algm_cpu_clap_decide) clapDecide;
    decltype(&algm_cpu_clap_apply) clapApply;
    decltype(&algm_cpu_gbm_workspace) gbmWorkspace;
    decltype(&algm_cpu_gbm_decide) gbmDecide;
    decltype(&algm_cpu_gbm_apply) gbmApply;
    decltype(&algm_cpu_unmerge) unmerge;
    decltype(&algm_cpu_label_map) labelMap;
};

// Every member function of a provider's kernels in the order of `Backend`.
#define ALGM_KERNELS_OF(device)                                                                                 \
    algm_##device##_status_text, algm_##device##_clap_workspace, algm_##device##_clap_decide,                   \
        algm_##device##_clap_apply, algm_##device##_gbm_workspace, algm_##device##_gbm_decide,                  \
        algm_##device##_gbm_apply, algm_##device##_unmerge, algm_##device##_label_map

extern Backend const kCpu;
#ifdef ALGM_WITH_CUDA
extern Backend const kCuda;
#endif

struct Tensor {
    std::vector<int64_t> shape;
    ONNXTensorElementDataType type{};
    void const* data{};

    template <class T>
    T const* as() const {
        return static_cast<T const*>(data);
    }

    // The kernels' name for the type of token values.
    int32_t dtype() const;
};

// Attributes of a node while its kernel is made.
class Attributes {
public:
    Attributes(OrtApi const& api, OrtKernelInfo const* info) : api_(api), info_(info) {}

    int64_t integer(char const* name) const;
    float real(char const* name) const;
    // Two whole numbers, such as a grid.
    void pair(char const* name, int64_t (&values)[2]) const;
    // The place of a string among the names it may have.
    int32_t choice(char const* name, std::initializer_list<char const*> names) const;

private:
    OrtApi const& api_;
    OrtKernelInfo const* info_;
};

class Call {
public:
    Call(OrtApi const& api, OrtKernelContext* context, Backend const& backend);

    Tensor input(size_t index, size_t rank) const;
    template <class T = void>
    T* output(size_t index, std::vector<int64_t> const& shape) const {
        return static_cast<T*>(outputData(index, shape));
    }
    Scratch scratch(size_t bytes) const { return kernels.scratch(bytes, stream); }
    // Throws unless a kernel succeeded; `what` says what was being done.
    void done(int status, char const* what) const;

    Backend const& kernels;
    void* stream{};

private:
    void* outputData(size_t index, std::vector<int64_t> const& shape) const;

    OrtApi const& api_;
    OrtKernelContext* context_;
};

}  // namespace algm

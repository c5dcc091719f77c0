#include "plugin.h"

#include <dlfcn.h>

#include <iostream>

namespace algm {

using Severity = nvinfer1::ILogger::Severity;

// The logger of TensorRT 11 and RTX 1.7: there ILogger became a versioned interface, which moved its one function.
// Not in the anonymous namespace: the compiler would conclude that nobody implements it and call the pure function.
class VersionedLogger : public nvinfer1::IVersionedInterface {
public:
    virtual void log(Severity severity, char const *message) noexcept = 0;
};

namespace {

template <class Function>
Function *symbol(void *library, char const *name) noexcept {
    return reinterpret_cast<Function *>(dlsym(library, name));
}

// Hands the message to the logger of a loaded TensorRT; false where that has none, or one of unknown layout.
bool logTo(void *library, Severity severity, char const *message) noexcept {
    auto *getLogger = symbol<void *()>(library, "getLogger");
    auto *getMajor = symbol<int32_t()>(library, "getInferLibMajorVersion");
    auto *getMinor = symbol<int32_t()>(library, "getInferLibMinorVersion");
    void *logger = getLogger && getMajor && getMinor ? getLogger() : nullptr;
    if (!logger) {
        return false;
    }
    int32_t const major = getMajor();
    if (major == 10) {
        static_cast<nvinfer1::ILogger *>(logger)->log(severity, message);
        return true;
    }
    if (major >= 11 || (major == 1 && getMinor() >= 7)) {
        static_cast<VersionedLogger *>(logger)->log(severity, message);
        return true;
    }
    return false;
}

}  // namespace

void log(Severity severity, std::string const &message) noexcept {
    // Linking against a library would tie this one to a single TensorRT; the one that is loaded is asked instead.
    for (char const *name : {"libtensorrt_rtx.so.1", "libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer_lean.so.11",
                             "libnvinfer_lean.so.10", "libnvinfer_dispatch.so.11", "libnvinfer_dispatch.so.10"}) {
        if (void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) {
            bool const done = logTo(library, severity, message.c_str());
            dlclose(library);
            if (done) {
                return;
            }
        }
    }
    std::cerr << "algm_deploy plugin " << message << '\n';
}

char const *nameOf(nvinfer1::DataType type) noexcept {
    switch (type) {
        case nvinfer1::DataType::kFLOAT: return "float32";
        case nvinfer1::DataType::kHALF: return "float16";
        case nvinfer1::DataType::kBF16: return "bfloat16";
        case nvinfer1::DataType::kINT8: return "int8";
        case nvinfer1::DataType::kINT32: return "int32";
        case nvinfer1::DataType::kINT64: return "int64";
        case nvinfer1::DataType::kUINT8: return "uint8";
        case nvinfer1::DataType::kBOOL: return "bool";
        default: return "another type";
    }
}

bool isTokenType(nvinfer1::DataType type) noexcept {
    return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16;
}

int32_t tokenType(nvinfer1::DataType type) {
    switch (type) {
        case nvinfer1::DataType::kFLOAT: return ALGM_FLOAT32;
        case nvinfer1::DataType::kHALF: return ALGM_FLOAT16;
        case nvinfer1::DataType::kBF16: return ALGM_BFLOAT16;
        default: fail("tokens should be one of float32, float16, bfloat16, got ", nameOf(type));
    }
}

}  // namespace algm

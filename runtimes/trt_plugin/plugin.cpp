#include "plugin.h"

#include <atomic>
#include <iostream>

namespace algm {

namespace {
std::atomic<nvinfer1::ILoggerFinder*> loggerFinder{nullptr};
}  // namespace

void setFinder(nvinfer1::ILoggerFinder* finder) noexcept {
    loggerFinder = finder;
}

void log(nvinfer1::ILogger::Severity severity, std::string const& message) noexcept {
    auto* finder = loggerFinder.load();
    auto* logger = finder ? finder->findLogger() : nullptr;
    if (logger) {
        logger->log(severity, message.c_str());
    } else {
        std::cerr << "algm_deploy plugin " << message << '\n';
    }
}

char const* nameOf(nvinfer1::DataType type) noexcept {
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
    return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kHALF
        || type == nvinfer1::DataType::kBF16;
}

int32_t tokenType(nvinfer1::DataType type) {
    switch (type) {
    case nvinfer1::DataType::kFLOAT: return ALGM_FLOAT32;
    case nvinfer1::DataType::kHALF: return ALGM_FLOAT16;
    case nvinfer1::DataType::kBF16: return ALGM_BFLOAT16;
    default: fail("tokens should be one of float32, float16, bfloat16, got ", nameOf(type));
    }
}

void check(int status, char const* call) {
    if (status != ALGM_OK) {
        throw std::runtime_error(std::string{call} + " failed: " + algm_cuda_status_text(status));
    }
}

}  // namespace algm

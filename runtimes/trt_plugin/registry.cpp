// What is looked up in the library: two functions by TensorRT, and by whoever opens an engine the sources' identity.
#include "operators.h"

// TensorRT refuses a library without this function. The finder is not used: it knows no logger while a network is
// parsed.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder *) {}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface *const *getCreators(
    int32_t &count) {
    static algm::Creator<algm::Sized<algm::Clap>> clap;
    static algm::Creator<algm::Sized<algm::Gbm>> gbm;
    static algm::Creator<algm::Unmerge> unmerge;
    static algm::Creator<algm::Labels> labelMap;
    static algm::Creator<algm::DeformableAttention> deformableAttention;
    static nvinfer1::IPluginCreatorInterface *const creators[]{&clap, &gbm, &unmerge, &labelMap, &deformableAttention};
    count = 5;
    return creators;
}

// Version of the plugins and hash of the sources that this library was made of. An engine runs with every build of the
// sources it was built with; the bytes of two builds differ.
extern "C" __attribute__((visibility("default"))) char const *algm_plugin_sources() {
    static std::string const identity = std::string{algm::kVersion} + '-' + ALGM_PLUGIN_SOURCES;
    return identity.c_str();
}

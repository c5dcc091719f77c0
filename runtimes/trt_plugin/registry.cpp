// The two functions that TensorRT looks up when it loads the library.
#include "operators.h"

// TensorRT refuses a library without this function. The finder is not used: it knows no logger while a network is
// parsed.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder *) {}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface *const *getCreators(
    int32_t &count) {
    static algm::Creator<algm::Clap> clap;
    static algm::Creator<algm::Gbm> gbm;
    static algm::Creator<algm::Unmerge> unmerge;
    static algm::Creator<algm::Labels> labelMap;
    static nvinfer1::IPluginCreatorInterface *const creators[]{&clap, &gbm, &unmerge, &labelMap};
    count = 4;
    return creators;
}

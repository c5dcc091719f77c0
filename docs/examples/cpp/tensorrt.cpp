// A bundle in C++ with TensorRT: a photo in, its label map out, and the tokens that were left.
//
//   segment_tensorrt BUNDLE ENGINE LIBRARY PHOTO.ppm LABELS.pgm
//
// ENGINE is what `algm-deploy build BUNDLE --runtime tensorrt` has written (BUNDLE/engines/tensorrt.engine), or trtexec from
// model.tensorrt.onnx; LIBRARY is libalgm_trt_plugin.so.
#include "bundle.h"

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

namespace {

void check(cudaError_t code) {
    if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

void require(bool done, const char *what) {
    if (!done) throw std::runtime_error(std::string("TensorRT could not ") + what);
}

class Logger : public nvinfer1::ILogger {
    void log(Severity severity, const char *message) noexcept override {
        if (severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", message);
    }
};

size_t bytesOf(nvinfer1::DataType type) {
    switch (type) {
    case nvinfer1::DataType::kINT64: return 8;
    case nvinfer1::DataType::kFLOAT:
    case nvinfer1::DataType::kINT32: return 4;
    case nvinfer1::DataType::kUINT8: return 1;
    default: throw std::runtime_error("the engine has a tensor of an unexpected type");
    }
}

// A tensor of the engine, in the memory of the GPU.
struct Tensor {
    nvinfer1::DataType type{};
    size_t elements = 0;
    std::unique_ptr<void, cudaError_t (*)(void *)> memory{nullptr, cudaFree};
    void allocate() {
        void *address = nullptr;
        check(cudaMalloc(&address, std::max<size_t>(1, elements * bytesOf(type))));
        memory.reset(address);
    }
    template <typename T> void put(const std::vector<T> &values) const {
        check(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    template <typename T> std::vector<T> get() const {
        std::vector<T> values(elements);
        check(cudaMemcpy(values.data(), memory.get(), elements * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    std::vector<float> numbers() const {
        auto all = [](const auto &values) { return std::vector<float>(values.begin(), values.end()); };
        if (type == nvinfer1::DataType::kUINT8) return all(get<uint8_t>());
        return type == nvinfer1::DataType::kINT32 ? all(get<int32_t>()) : get<float>();
    }
};

void segment(char **given) {
    const std::string bundle = given[1], path = given[2];
    const Manifest manifest(bundle + "/manifest.json");
    const Protocol protocol(manifest);
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> plan{std::istreambuf_iterator<char>(file), {}};
    if (plan.empty()) throw std::runtime_error("cannot read " + path);

    Logger logger;
    const std::unique_ptr<nvinfer1::IRuntime> runtime{nvinfer1::createInferRuntime(logger)};
    require(runtime && runtime->getPluginRegistry().loadLibrary(given[3]), "load the plugins");
    const std::unique_ptr<nvinfer1::ICudaEngine> engine{runtime->deserializeCudaEngine(plan.data(), plan.size())};
    require(engine != nullptr, "load the engine");
    const std::unique_ptr<nvinfer1::IExecutionContext> context{engine->createExecutionContext()};
    require(context && context->setInputShape("image", nvinfer1::Dims4{1, 3, protocol.height, protocol.width}),
            "take one window");

    std::map<std::string, Tensor> tensors; // token maps among them: an engine computes all outputs it has
    for (int i = 0; i < engine->getNbIOTensors(); ++i) {
        const char *name = engine->getIOTensorName(i);
        Tensor &tensor = tensors[name];
        tensor.type = engine->getTensorDataType(name);
        const nvinfer1::Dims shape = context->getTensorShape(name);
        tensor.elements = 1;
        for (int axis = 0; axis < shape.nbDims; ++axis) tensor.elements *= static_cast<size_t>(shape.d[axis]);
        tensor.allocate();
        require(context->setTensorAddress(name, tensor.memory.get()), "take an address");
        if (engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT && std::string("image") != name)
            tensor.put(std::vector<float>{static_cast<float>(manifest.number(std::string("signature/defaults/") + name))});
    }

    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    std::vector<int64_t> counts(tensors.at("token_counts").elements);
    auto network = [&](const std::vector<float> &window) {
        const Tensor &image = tensors.at("image");
        if (image.type == nvinfer1::DataType::kUINT8)
            image.put(rounded(window));
        else
            image.put(window);
        require(context->enqueueV3(stream), "run the network");
        check(cudaStreamSynchronize(stream));
        const std::vector<int64_t> left = tensors.at("token_counts").get<int64_t>();
        for (size_t i = 0; i < counts.size(); ++i) counts[i] += left[i];
        return tensors.at(manifest.text("recipe/output")).numbers();
    };
    writePgm(given[5], labelMap(readPpm(given[4]), protocol, network), protocol.classes);
    check(cudaStreamDestroy(stream));
    printCounts(counts);
}

} // namespace

int main(int count, char **given) {
    try {
        if (count != 6) throw std::runtime_error("expected BUNDLE ENGINE LIBRARY PHOTO.ppm LABELS.pgm");
        segment(given);
        return EXIT_SUCCESS;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "segment_tensorrt: %s\n", error.what());
        return EXIT_FAILURE;
    }
}

// A bundle in C++ with ONNX Runtime: a photo in, its label map out, and the tokens that were left.
//
//   segment_onnxruntime BUNDLE PHOTO.ppm LABELS.pgm [GRAPH [LIBRARY]] [THRESHOLD=VALUE]...
//
// GRAPH is a file of the bundle, by default model.onnx, which needs no LIBRARY. That of the operators of algm-deploy is
// libalgm_ort_custom_op.so, for graphs that `algm-deploy build` has written. THRESHOLD is clap_threshold or gbm_threshold.
#include "bundle.h"

#include <onnxruntime_cxx_api.h>

#include <cstdio>
#include <cstdlib>

namespace {

float number(const std::string &word, const std::string &value) {
    char *end = nullptr;
    const float found = std::strtof(value.c_str(), &end);
    if (value.empty() || *end || std::isnan(found)) throw std::runtime_error("expected a number in " + word);
    return found;
}

struct Arguments {
    std::string bundle, photo, labels, graph = "model.onnx", library;
    std::map<std::string, float> thresholds;
    Arguments(int count, char **given) {
        std::vector<std::string> names;
        for (int i = 1; i < count; ++i) {
            const std::string word = given[i];
            const size_t equals = word.find('=');
            const bool threshold = equals != std::string::npos && word.find('/') == std::string::npos;
            if (threshold)
                thresholds[word.substr(0, equals)] = number(word, word.substr(equals + 1));
            else
                names.push_back(word);
        }
        if (names.size() < 3 || names.size() > 5)
            throw std::runtime_error("expected BUNDLE PHOTO.ppm LABELS.pgm [GRAPH [LIBRARY]] [THRESHOLD=VALUE]...");
        bundle = names[0], photo = names[1], labels = names[2];
        if (names.size() > 3) graph = names[3];
        if (names.size() > 4) library = names[4];
    }
};

void segment(const Arguments &given) {
    const Manifest manifest(given.bundle + "/manifest.json");
    const Protocol protocol(manifest);
    const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "segment");
    Ort::SessionOptions options;
    if (!given.library.empty()) options.RegisterCustomOpsLibrary(given.library.c_str());
    if (manifest.text("recipe/precision") == "int8") // or half of the products are fp32 where shapes are fixed
        options.AddConfigEntry("optimization.disable_specified_optimizers", "MatMulAddFusion");
    Ort::Session session(env, (given.bundle + "/" + given.graph).c_str(), options);
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);

    std::vector<std::string> names; // of the inputs; the manifest has the thresholds that the bundle was verified with
    std::map<std::string, float> thresholds;
    for (size_t i = 0; i < session.GetInputCount(); ++i) {
        names.emplace_back(session.GetInputNameAllocated(i, Ort::AllocatorWithDefaultOptions()).get());
        const std::string &name = names.back();
        if (name == "image") continue;
        const auto chosen = given.thresholds.find(name);
        thresholds[name] = chosen != given.thresholds.end()
                               ? chosen->second
                               : static_cast<float>(manifest.number("signature/defaults/" + name));
    }
    for (const auto &[name, value] : given.thresholds)
        if (!thresholds.count(name)) throw std::runtime_error("this network reads no " + name);

    const std::string main = manifest.text("recipe/output");
    const bool bytes = manifest.text("signature/inputs/0/dtype") == "uint8";
    const std::vector<int64_t> shape{1, 3, protocol.height, protocol.width};
    std::vector<int64_t> counts(1); // of all windows: one number a merge
    auto network = [&](const std::vector<float> &window) {
        std::vector<float> pixels = window;
        std::vector<uint8_t> whole = rounded(window);
        std::vector<Ort::Value> values;
        std::vector<const char *> inputs;
        for (const std::string &name : names) {
            inputs.push_back(name.c_str());
            if (name != "image")
                values.push_back(Ort::Value::CreateTensor<float>(memory, &thresholds.at(name), 1, nullptr, 0));
            else if (bytes)
                values.push_back(Ort::Value::CreateTensor(memory, whole.data(), whole.size(), shape.data(), 4));
            else
                values.push_back(Ort::Value::CreateTensor(memory, pixels.data(), pixels.size(), shape.data(), 4));
        }
        const char *outputs[] = {main.c_str(), "token_counts"};
        const auto found = session.Run(Ort::RunOptions{}, inputs.data(), values.data(), values.size(), outputs, 2);
        const size_t merges = found[1].GetTensorTypeAndShapeInfo().GetElementCount();
        counts.resize(merges);
        for (size_t i = 0; i < merges; ++i) counts[i] += found[1].GetTensorData<int64_t>()[i];
        const auto info = found[0].GetTensorTypeAndShapeInfo();
        const size_t size = info.GetElementCount();
        auto all = [&](const auto *first) { return std::vector<float>(first, first + size); };
        if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) return all(found[0].GetTensorData<uint8_t>());
        if (info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) return all(found[0].GetTensorData<int32_t>());
        return all(found[0].GetTensorData<float>());
    };
    writePgm(given.labels, labelMap(readPpm(given.photo), protocol, network), protocol.classes);
    printCounts(counts);
}

} // namespace

int main(int count, char **given) {
    try {
        segment(Arguments(count, given));
        return EXIT_SUCCESS;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "segment_onnxruntime: %s\n", error.what());
        return EXIT_FAILURE;
    }
}

// Registration: each operator once for the CPU and, in a build with CUDA, once for the CUDA provider.
#include <atomic>
#include <climits>
#include <memory>
#include <string>
#include <vector>

#include "operators.h"

namespace algm {

namespace {

Scratch hostScratch(size_t bytes, void*) {
    return {::operator new(bytes), {[](void* memory, void*) { ::operator delete(memory); }, nullptr}};
}

int64_t* threadCount() {
    static thread_local int64_t count;
    return &count;
}

OrtApi const* g_api = nullptr;

template <class Work>
OrtStatus* guarded(Work&& work) noexcept {
    try {
        work();
        return nullptr;
    } catch (std::exception const& error) {
        return g_api->CreateStatus(ORT_FAIL, error.what());
    }
}

// Lets all outputs have the type and the shape of the first input, tokens (B,S,D). ONNX Runtime finds the type itself
// where one input alone has that of the tokens. It takes a shape without axes for a scalar's, and a side without a number
// or a name for -1, so what is not known gets names.
template <size_t COUNT>
OrtStatus* likeTheFirst(OrtCustomOp const*, OrtShapeInferContext* context) {
    return guarded([&] {
        static std::atomic<int64_t> unknown{0};
        OrtTensorTypeAndShapeInfo* first{};  // stays the context's
        check(*g_api, g_api->ShapeInferContext_GetInputTypeShape(context, 0, &first));
        ONNXTensorElementDataType type{};
        size_t axes{};
        check(*g_api, g_api->GetTensorElementType(first, &type));
        check(*g_api, g_api->GetDimensionsCount(first, &axes));
        std::vector<int64_t> sides(axes == 0 ? 3 : axes, -1);
        std::vector<char const*> names(sides.size(), "");
        if (axes > 0) {
            check(*g_api, g_api->GetDimensions(first, sides.data(), axes));
            check(*g_api, g_api->GetSymbolicDimensions(first, names.data(), axes));
        }
        std::vector<std::string> made(sides.size());
        for (size_t i = 0; i < sides.size(); ++i) {
            if (sides[i] < 0 && *names[i] == 0) {
                made[i] = "algm_unknown_" + std::to_string(unknown++);
                names[i] = made[i].c_str();
            }
        }
        OrtTensorTypeAndShapeInfo* shape{};
        check(*g_api, g_api->CreateTensorTypeAndShapeInfo(&shape));
        std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(g_api->ReleaseTensorTypeAndShapeInfo)> const owned(
            shape, g_api->ReleaseTensorTypeAndShapeInfo);
        check(*g_api, g_api->SetTensorElementType(shape, type));
        check(*g_api, g_api->SetDimensions(shape, sides.data(), sides.size()));
        check(*g_api, g_api->SetSymbolicDimensions(shape, names.data(), names.size()));
        for (size_t i = 0; i < COUNT; ++i) {
            check(*g_api, g_api->ShapeInferContext_SetOutputTypeShape(context, i, shape));
        }
    });
}

// An operator for a provider, in the form that ONNX Runtime asks for: a struct of functions.
template <class Operator, Backend const& backend>
struct Definition : OrtCustomOp {
    Definition() : OrtCustomOp{} {
        version = kApiVersion;
        GetName = [](OrtCustomOp const*) { return Operator::kName; };
        GetExecutionProviderType = [](OrtCustomOp const*) { return backend.provider; };
        GetInputTypeCount = [](OrtCustomOp const*) { return Operator::kInputCount; };
        GetOutputTypeCount = [](OrtCustomOp const*) { return Operator::kOutputCount; };
        GetInputType = [](OrtCustomOp const*, size_t index) { return Operator::inputType(index); };
        GetOutputType = [](OrtCustomOp const*, size_t index) { return Operator::outputType(index); };
        GetInputCharacteristic = [](OrtCustomOp const*, size_t index) {
            return index < Operator::kRequiredCount ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
        };
        GetOutputCharacteristic = [](OrtCustomOp const*, size_t) { return INPUT_OUTPUT_REQUIRED; };
        GetInputMemoryType = [](OrtCustomOp const*, size_t) { return OrtMemTypeDefault; };
        GetStartVersion = [](OrtCustomOp const*) { return 1; };
        GetEndVersion = [](OrtCustomOp const*) { return INT_MAX; };
        if constexpr (Operator::kTokenInputs > 1) {
            InferOutputShapeFn = likeTheFirst<Operator::kOutputCount>;
        }
        CreateKernelV2 = [](OrtCustomOp const*, OrtApi const*, OrtKernelInfo const* info, void** kernel) {
            return guarded([&] { *kernel = new Operator(ReadAttribute(*g_api, info)); });
        };
        KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
            return guarded([&] { static_cast<Operator const*>(kernel)->run(Call(*g_api, context, backend)); });
        };
        KernelDestroy = [](void* kernel) { delete static_cast<Operator*>(kernel); };
    }
};

template <class Operator, Backend const& backend>
void add(OrtCustomOpDomain* domain) {
    static Definition<Operator, backend> const definition;
    check(*g_api, g_api->CustomOpDomain_Add(domain, &definition));
}

template <Backend const& backend>
void addAll(OrtCustomOpDomain* domain) {
    add<Merge<Clap>, backend>(domain);
    add<Merge<Gbm>, backend>(domain);
    add<PaddedMerge<Clap>, backend>(domain);
    add<PaddedMerge<Gbm>, backend>(domain);
    add<BucketedMerge<Clap>, backend>(domain);
    add<BucketedMerge<Gbm>, backend>(domain);
    add<Attention<false>, backend>(domain);
    add<Attention<true>, backend>(domain);
    add<Reframe, backend>(domain);
    add<Apart, backend>(domain);
    add<Gelu, backend>(domain);
    add<BiasSkip, backend>(domain);
    add<BiasSkipNorm, backend>(domain);
    add<LayerNorm, backend>(domain);
    add<Patches, backend>(domain);
    add<Node<Unmerge>, backend>(domain);
    add<Labels, backend>(domain);
    add<MaskLabels, backend>(domain);
    add<Looking, backend>(domain);
}

// Sessions keep pointers to the domain and its operators, so it lives as long as the process.
OrtCustomOpDomain* makeDomain() {
    OrtCustomOpDomain* domain{};
    check(*g_api, g_api->CreateCustomOpDomain("algm", &domain));
    addAll<kCpu>(domain);
#ifdef ALGM_WITH_CUDA
    addAll<kCuda>(domain);
#endif
    return domain;
}

}  // namespace

Backend const kCpu{"CPUExecutionProvider", hostScratch, threadCount, nullptr, nullptr, ALGM_KERNELS_OF(cpu)};

}  // namespace algm

extern "C" ALGM_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, OrtApiBase const* base) {
    algm::g_api = base->GetApi(algm::kApiVersion);
    if (algm::g_api == nullptr) {
        // The oldest interface that can still carry a message.
        return base->GetApi(1)->CreateStatus(ORT_FAIL, "the algm operators need ONNX Runtime 1.18 or later");
    }
    return algm::guarded([&] {
        static OrtCustomOpDomain* const domain = algm::makeDomain();
        algm::check(*algm::g_api, algm::g_api->AddCustomOpDomain(options, domain));
    });
}

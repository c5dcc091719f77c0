// Drives plugins as TensorRT would, through a real registry: the registry of whatever runtime library is given.
// A C interface for plugin_harness.py. This is no TensorRT execution: no engine, builder or execution context is here.
#include <NvInferRuntime.h>

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

// The registry interface of TensorRT 11 and RTX, which dropped the deprecated calls of the 10.x headers and so moved
// the others up. Only order matters: these are the slots up to the last one used here. Not in the anonymous namespace,
// where the compiler would conclude that nobody implements it.
class Registry11 {
protected:
    virtual ~Registry11() = default;

public:
    virtual void setErrorRecorder(IErrorRecorder *) = 0;
    virtual IErrorRecorder *getErrorRecorder() const = 0;
    virtual bool isParentSearchEnabled() const = 0;
    virtual void setParentSearchEnabled(bool) = 0;
    virtual void *loadLibrary(char const *) = 0;
    virtual void deregisterLibrary(void *) = 0;
    virtual bool registerCreator(IPluginCreatorInterface &, char const *) = 0;
    virtual IPluginCreatorInterface *const *getAllCreators(int32_t *) const = 0;
    virtual IPluginCreatorInterface *getCreator(char const *, char const *, char const *) = 0;
};

namespace {

constexpr int kUnknown = -1;
constexpr int kSizeTensor = -1000;  // minus the index of the output that holds the size

IPluginRegistry *registry10{};
Registry11 *registry11{};

// --- dimension expressions, evaluated at once

struct Expression final : IDimensionExpr, apiv::VDimensionExpr {
    explicit Expression(int64_t v) : value{v} { IDimensionExpr::mImpl = this; }
    bool isConstant() const override { return true; }
    int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return value <= kSizeTensor; }
    int64_t value;
};

struct Expressions final : IExprBuilder, apiv::VExprBuilder {
    Expressions() { IExprBuilder::mImpl = this; }
    IDimensionExpr const *keep(int64_t value) {
        kept.push_back(std::make_unique<Expression>(value));
        return kept.back().get();
    }
    IDimensionExpr const *constant(int64_t value) override { return keep(value); }
    IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &first,
                                    IDimensionExpr const &second) override {
        auto const a = first.getConstantValue();
        auto const b = second.getConstantValue();
        bool const counted = first.isSizeTensor() || second.isSizeTensor();
        switch (op) {
            case DimensionOperation::kCEIL_DIV: return counted ? nullptr : keep((a + b - 1) / b);
            case DimensionOperation::kSUM: return counted ? nullptr : keep(a + b);
            case DimensionOperation::kPROD: return counted ? nullptr : keep(a * b);
            case DimensionOperation::kMIN: return counted ? nullptr : keep(a < b ? a : b);
            default: return nullptr;
        }
    }
    IDimensionExpr const *declareSizeTensor(int32_t index, IDimensionExpr const &opt,
                                            IDimensionExpr const &max) override {
        optimum = opt.getConstantValue();
        upper = max.getConstantValue();
        return keep(kSizeTensor - index);
    }
    std::vector<std::unique_ptr<Expression>> kept;
    int64_t optimum{kUnknown};
    int64_t upper{kUnknown};
};

template <class Capability>
Capability *capability(void *plugin, PluginCapabilityType type) {
    return static_cast<Capability *>(static_cast<IPluginV3 *>(plugin)->getCapabilityInterface(type));
}

IPluginV3OneBuild *build(void *plugin) { return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD); }

IPluginV3OneRuntime *runtime(void *plugin) {
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

}  // namespace

extern "C" {

struct Tensor {
    int32_t type;
    int32_t rank;
    int64_t dims[8];
    void *data;
};

struct Field {
    char const *name;
    int32_t type;
    int32_t length;
    void const *data;
};

// 1 when the library has a registry. Only one library a process.
int32_t harness_open(char const *runtimeLibrary) {
    void *library = dlopen(runtimeLibrary, RTLD_NOW | RTLD_GLOBAL);
    auto get = library ? reinterpret_cast<void *(*)()>(dlsym(library, "getPluginRegistry")) : nullptr;
    auto version = library ? reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibMajorVersion")) : nullptr;
    if (get == nullptr || version == nullptr) {
        return 0;
    }
    bool const enterprise10 = version() == NV_TENSORRT_MAJOR;
    (enterprise10 ? reinterpret_cast<void *&>(registry10) : reinterpret_cast<void *&>(registry11)) = get();
    return 1;
}

int32_t harness_load(char const *pluginLibrary) {
    return (registry10 ? registry10->loadLibrary(pluginLibrary) : registry11->loadLibrary(pluginLibrary)) != nullptr;
}

void *harness_create(char const *name, char const *space, Field const *fields, int32_t count, int32_t phase) {
    auto *creator = registry10 ? registry10->getCreator(name, "2", space) : registry11->getCreator(name, "2", space);
    if (creator == nullptr) {
        return nullptr;
    }
    std::vector<PluginField> list;
    for (int32_t i = 0; i < count; ++i) {
        list.emplace_back(fields[i].name, fields[i].data, static_cast<PluginFieldType>(fields[i].type),
                          fields[i].length);
    }
    PluginFieldCollection const collection{count, list.data()};
    return static_cast<IPluginCreatorV3One *>(creator)->createPlugin(name, &collection,
                                                                     static_cast<TensorRTPhase>(phase));
}

void *harness_clone(void *plugin) { return static_cast<IPluginV3 *>(plugin)->clone(); }
void *harness_attach(void *plugin) { return runtime(plugin)->attachToContext(nullptr); }
void harness_destroy(void *plugin) { delete static_cast<IPluginV3 *>(plugin); }

// What TensorRT writes into an engine: up to `room` fields, whose data still lies in the plugin.
int32_t harness_fields(void *plugin, Field *fields, int32_t room) {
    auto const *collection = runtime(plugin)->getFieldsToSerialize();
    for (int32_t i = 0; i < collection->nbFields && i < room; ++i) {
        auto const &field = collection->fields[i];
        fields[i] = {field.name, static_cast<int32_t>(field.type), field.length, field.data};
    }
    return collection->nbFields;
}

int32_t harness_types(void *plugin, int32_t const *inputs, int32_t nbInputs, int32_t *outputs, int32_t nbOutputs) {
    static_assert(sizeof(DataType) == sizeof(int32_t), "DataType is an int32");
    return build(plugin)->getOutputDataTypes(reinterpret_cast<DataType *>(outputs), nbOutputs,
                                             reinterpret_cast<DataType const *>(inputs), nbInputs);
}

int32_t harness_accepts(void *plugin, int32_t position, int32_t const *types, int32_t nbInputs, int32_t nbOutputs,
                        int32_t format) {
    std::vector<DynamicPluginTensorDesc> list(nbInputs + nbOutputs);
    for (size_t i = 0; i < list.size(); ++i) {
        list[i].desc.type = static_cast<DataType>(types[i]);
        list[i].desc.format = static_cast<TensorFormat>(format);
    }
    return build(plugin)->supportsFormatCombination(position, list.data(), nbInputs, nbOutputs);
}

// Output shapes into `outputs`; a dimension that a size tensor holds reads -1000 minus the index of that output.
// `size` receives the optimum and the upper bound of the size tensor.
int32_t harness_shapes(void *plugin, Tensor const *inputs, int32_t nbInputs, Tensor *outputs, int32_t nbOutputs,
                       int64_t *size) {
    Expressions expressions;
    std::vector<DimsExprs> in(nbInputs), out(nbOutputs);
    for (int32_t i = 0; i < nbInputs; ++i) {
        in[i].nbDims = inputs[i].rank;
        for (int32_t axis = 0; axis < inputs[i].rank; ++axis) {
            in[i].d[axis] = expressions.keep(inputs[i].dims[axis]);
        }
    }
    int32_t const status =
        build(plugin)->getOutputShapes(in.data(), nbInputs, nullptr, 0, out.data(), nbOutputs, expressions);
    for (int32_t i = 0; status == 0 && i < nbOutputs; ++i) {
        outputs[i].rank = out[i].nbDims;
        for (int32_t axis = 0; axis < out[i].nbDims; ++axis) {
            outputs[i].dims[axis] = out[i].d[axis]->getConstantValue();
        }
    }
    size[0] = expressions.optimum;
    size[1] = expressions.upper;
    return status;
}

namespace {

PluginTensorDesc describe(Tensor const &tensor) {
    PluginTensorDesc desc{};
    desc.type = static_cast<DataType>(tensor.type);
    desc.format = TensorFormat::kLINEAR;
    desc.dims.nbDims = tensor.rank;
    std::memcpy(desc.dims.d, tensor.dims, sizeof(int64_t) * tensor.rank);
    return desc;
}

}  // namespace

int64_t harness_workspace(void *plugin, Tensor const *inputs, int32_t nbInputs, int32_t nbOutputs) {
    std::vector<DynamicPluginTensorDesc> in(nbInputs), out(nbOutputs);
    for (int32_t i = 0; i < nbInputs; ++i) {
        in[i].desc = describe(inputs[i]);
        in[i].min = in[i].max = in[i].opt = in[i].desc.dims;
    }
    if (build(plugin)->configurePlugin(in.data(), nbInputs, out.data(), nbOutputs) != 0) {
        return -1;
    }
    return static_cast<int64_t>(build(plugin)->getWorkspaceSize(in.data(), nbInputs, out.data(), nbOutputs));
}

int32_t harness_enqueue(void *plugin, Tensor const *inputs, int32_t nbInputs, Tensor const *outputs, int32_t nbOutputs,
                        void *workspace, void *stream) {
    std::vector<PluginTensorDesc> in, out;
    std::vector<void const *> sources;
    std::vector<void *> targets;
    for (int32_t i = 0; i < nbInputs; ++i) {
        in.push_back(describe(inputs[i]));
        sources.push_back(inputs[i].data);
    }
    for (int32_t i = 0; i < nbOutputs; ++i) {
        out.push_back(describe(outputs[i]));
        targets.push_back(outputs[i].data);
    }
    int32_t const status = runtime(plugin)->onShapeChange(in.data(), nbInputs, out.data(), nbOutputs);
    if (status != 0) {
        return status;
    }
    return runtime(plugin)->enqueue(in.data(), out.data(), sources.data(), targets.data(), workspace,
                                    static_cast<cudaStream_t>(stream));
}

}  // extern "C"

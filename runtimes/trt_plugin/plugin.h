// The shell that every algm plugin shares: one class template over an operator's description.
//
// An operator of ../shell.h is a plain struct; its attributes are `int32_t` and `float` members and lists of `int32_t`
// only, TensorRT serialises nothing else faithfully. `Plugin<Operator>` makes an `IPluginV3` of it, with the shapes that `outputShapes` tells,
// `Creator<Operator>` the factory that TensorRT's registry knows. Nothing here links against TensorRT: every call
// goes through the interfaces that TensorRT hands in, so one binary serves TensorRT 10, 11 and RTX.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "../shell.h"

namespace algm {

inline constexpr char const *kNamespace = "algm_deploy";
inline constexpr char const *kVersion = "2";

inline constexpr Kernels kCuda = ALGM_KERNELS_OF(cuda);

// Writes through the logger of the TensorRT that this process has loaded; to the standard error stream without one.
void log(nvinfer1::ILogger::Severity severity, std::string const &message) noexcept;

// Readable name of a data type.
char const *nameOf(nvinfer1::DataType type) noexcept;

// True for the types that tokens may have: fp32, fp16, bf16.
bool isTokenType(nvinfer1::DataType type) noexcept;

// The kernel library's number for a token type.
int32_t tokenType(nvinfer1::DataType type);

// Runs `body`; no exception may cross TensorRT's ABI, so each becomes a log line and a non-zero code.
template <class Body>
int32_t guarded(char const *plugin, Body &&body) noexcept {
    try {
        body();
        return 0;
    } catch (std::exception const &error) {
        log(nvinfer1::ILogger::Severity::kERROR, std::string{plugin} + ": " + error.what());
    } catch (...) {
        log(nvinfer1::ILogger::Severity::kERROR, std::string{plugin} + ": unknown error");
    }
    return -1;
}

// Throws where an attribute lies outside what it may be.
struct CheckAttribute {
    void operator()(char const *name, int32_t value, int32_t low) const { within(value, low, kMaxAttribute, name); }
    void operator()(char const *name, int32_t const (&values)[2], int32_t low) const {
        for (int32_t value : values) {
            within(value, low, kMaxAttribute, name);
        }
    }
    void operator()(char const *name, Numbers const &values, int32_t low) const {
        for (int32_t i = 0; i < values.count; ++i) {
            within(values.value[i], low, kMaxAttribute, name);
        }
    }
    void operator()(char const *name, int32_t value, Words const &words) const {
        within(value, 0, static_cast<int32_t>(words.count) - 1, name);
    }
    void operator()(char const *name, float value) const {
        if (!(value > 0)) {
            fail("attribute ", name, " should be positive, got ", value);
        }
    }
};

// Visits the attributes of an operator as (name, address, type, count).
template <class Operator, class Visit>
void visitFields(Operator &op, Visit &&visit) {
    op.attributes([&visit](char const *name, auto &member, auto const &...) {
        using Member = std::remove_reference_t<decltype(member)>;
        using Element = std::remove_cv_t<std::remove_all_extents_t<Member>>;
        if constexpr (std::is_same_v<Element, Numbers>) {
            visit(name, static_cast<void *>(member.value), nvinfer1::PluginFieldType::kINT32, member.count);
        } else {
            static_assert(std::is_same_v<Element, int32_t> || std::is_same_v<Element, float>);
            constexpr auto type = std::is_same_v<Element, float> ? nvinfer1::PluginFieldType::kFLOAT32
                                                                 : nvinfer1::PluginFieldType::kINT32;
            visit(name, static_cast<void *>(&member), type, static_cast<int32_t>(sizeof(Member) / sizeof(Element)));
        }
    });
}

// The field of an attribute, which must be there.
inline nvinfer1::PluginField const &fieldOf(nvinfer1::PluginFieldCollection const &fields, char const *name) {
    auto const *end = fields.fields + fields.nbFields;
    auto const *field =
        std::find_if(fields.fields, end, [name](auto const &one) { return std::strcmp(one.name, name) == 0; });
    if (field == end || field->data == nullptr) {
        fail("attribute ", name, " is missing");
    }
    return *field;
}

// Reads every attribute of `op` from `fields`; each must be there with its type and length.
template <class Operator>
void readFields(Operator &op, nvinfer1::PluginFieldCollection const &fields) {
    op.attributes([&fields](char const *name, auto &member, auto const &...) {
        if constexpr (std::is_same_v<std::remove_reference_t<decltype(member)>, Numbers>) {
            member.count = Numbers::counted(fieldOf(fields, name).length, name);
        }
    });
    visitFields(op, [&fields](char const *name, void *member, nvinfer1::PluginFieldType type, int32_t count) {
        auto const &field = fieldOf(fields, name);
        if (field.type != type || field.length != count) {
            fail("attribute ", name, " should hold ", count, " values of field type ", static_cast<int>(type), ", got ",
                 field.length, " of type ", static_cast<int>(field.type));
        }
        std::memcpy(member, field.data, static_cast<size_t>(count) * sizeof(int32_t));
    });
}

template <class Operator>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
    static constexpr int32_t kInputs = static_cast<int32_t>(Operator::kInputs.size());
    static constexpr int32_t kOutputs = static_cast<int32_t>(Operator::kOutputs.size());

public:
    explicit Plugin(Operator const &op) : mOperator{op} {
        // The fields hold addresses of members: every copy builds its own list, so that a clone never points into
        // the object it was cloned from.
        std::ostringstream text;
        visitFields(mOperator, [&](char const *name, void *member, nvinfer1::PluginFieldType type, int32_t count) {
            mFields.emplace_back(name, member, type, count);
            text << name << '=';
            for (int32_t i = 0; i < count; ++i) {
                text << (i ? "," : "");
                if (type == nvinfer1::PluginFieldType::kFLOAT32) {
                    text << static_cast<float *>(member)[i];
                } else {
                    text << static_cast<int32_t *>(member)[i];
                }
            }
            text << ' ';
        });
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
        mDescription = text.str();
    }
    Plugin(Plugin const &) = delete;
    Plugin &operator=(Plugin const &) = delete;

    // --- IPluginV3

    nvinfer1::IPluginCapability *getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore *>(this);
            case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild *>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime *>(this);
        }
        return nullptr;
    }

    nvinfer1::IPluginV3 *clone() noexcept override {
        nvinfer1::IPluginV3 *copy = nullptr;
        guarded(Operator::kName, [&] { copy = new Plugin{mOperator}; });
        return copy;
    }

    // --- core

    nvinfer1::AsciiChar const *getPluginName() const noexcept override { return Operator::kName; }
    nvinfer1::AsciiChar const *getPluginVersion() const noexcept override { return kVersion; }
    nvinfer1::AsciiChar const *getPluginNamespace() const noexcept override { return kNamespace; }

    // --- build

    int32_t getNbOutputs() const noexcept override { return kOutputs; }

    int32_t getOutputDataTypes(nvinfer1::DataType *outputTypes, int32_t nbOutputs, nvinfer1::DataType const *inputTypes,
                               int32_t nbInputs) const noexcept override {
        return guarded(Operator::kName, [&] {
            checkCounts(nbInputs, nbOutputs);
            for (int32_t i = 0; i < kInputs; ++i) {
                if (!accepts(Operator::kInputs[i], inputTypes[i], inputTypes[0])) {
                    fail("input ", Operator::kInputs[i].name, " has unsupported type ", nameOf(inputTypes[i]),
                         "; expected ", expected(Operator::kInputs[i]));
                }
            }
            for (int32_t i = 0; i < kOutputs; ++i) {
                outputTypes[i] = resolve(Operator::kOutputs[i], inputTypes[0]);
            }
        });
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const *inputs, int32_t nbInputs, nvinfer1::DimsExprs const *, int32_t,
                            nvinfer1::DimsExprs *outputs, int32_t nbOutputs,
                            nvinfer1::IExprBuilder &expressions) noexcept override {
        return guarded(Operator::kName, [&] {
            checkCounts(nbInputs, nbOutputs);
            for (int32_t i = 0; i < kInputs; ++i) {
                if (inputs[i].nbDims != Operator::kInputs[i].rank) {
                    fail("input ", Operator::kInputs[i].name, " should have rank ", Operator::kInputs[i].rank, ", got ",
                         inputs[i].nbDims);
                }
            }
            for (int32_t i = 0; i < kOutputs; ++i) {
                outputs[i].nbDims = Operator::kOutputs[i].rank;
            }
            outputShapes(mOperator, inputs, outputs, expressions);
        });
    }

    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const *inOut, int32_t nbInputs,
                                   int32_t nbOutputs) noexcept override {
        if (nbInputs != kInputs || nbOutputs != kOutputs || pos < 0 || pos >= kInputs + kOutputs) {
            return false;
        }
        Port const &port = pos < kInputs ? Operator::kInputs[pos] : Operator::kOutputs[pos - kInputs];
        return inOut[pos].desc.format == nvinfer1::TensorFormat::kLINEAR &&
               accepts(port, inOut[pos].desc.type, inOut[0].desc.type);
    }

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const *in, int32_t nbInputs,
                            nvinfer1::DynamicPluginTensorDesc const *, int32_t nbOutputs) noexcept override {
        return guarded(Operator::kName, [&] {
            checkCounts(nbInputs, nbOutputs);
            auto const largest = [in](int32_t i) -> auto const & { return in[i].max; };
            checkKnown(largest);
            mOperator.checkShapes(shapesOf(largest).data());
            scratchBytes(largest, in[0].desc.type);  // a size of 0 stops the build here, not a run much later
        });
    }

    // An error cannot be told here but by a size that no device has, which stops the build as well.
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const *inputs, int32_t,
                            nvinfer1::DynamicPluginTensorDesc const *, int32_t) const noexcept override {
        size_t bytes = std::numeric_limits<int64_t>::max();
        guarded(Operator::kName, [&] {
            auto const largest = [inputs](int32_t i) -> auto const & { return inputs[i].max; };
            checkKnown(largest);
            bytes = scratchBytes(largest, inputs[0].desc.type);
        });
        return bytes;
    }

    // The attributes, because two nodes that differ in one must not share a timing.
    char const *getTimingCacheID() noexcept override { return mDescription.c_str(); }
    char const *getMetadataString() noexcept override { return mDescription.c_str(); }

    // --- runtime

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const *in, int32_t nbInputs, nvinfer1::PluginTensorDesc const *,
                          int32_t nbOutputs) noexcept override {
        return guarded(Operator::kName, [&] {
            checkCounts(nbInputs, nbOutputs);
            mOperator.checkShapes(shapesOf([&](int32_t i) -> auto const & { return in[i].dims; }).data());
        });
    }

    int32_t enqueue(nvinfer1::PluginTensorDesc const *inputDesc, nvinfer1::PluginTensorDesc const *,
                    void const *const *inputs, void *const *outputs, void *workspace,
                    cudaStream_t stream) noexcept override {
        return guarded(Operator::kName, [&] {
            auto const dims = [inputDesc](int32_t i) -> auto const & { return inputDesc[i].dims; };
            checkKnown(dims);
            auto const shapes = shapesOf(dims);
            Launch call{kCuda, shapes.data(), tokenType(inputDesc[0].type), inputs, outputs, stream};
            if constexpr (Operator::kMerges) {
                // The kernels count in INT64, in front of the plan, and write TensorRT's INT32 as well.
                std::array<void *, kOutputs> counted;
                std::copy_n(outputs, kOutputs, counted.begin());
                counted.back() = workspace;
                call.outputs = counted.data();
                auto *plan = static_cast<char *>(workspace) + kCountBytes;
                mOperator.decide(call, plan, static_cast<int32_t *>(outputs[kOutputs - 1]));
                mOperator.apply(call, plan, ALGM_ROWS_ON_DEVICE);
            } else {
                mOperator.run(call);
            }
        });
    }

    nvinfer1::IPluginV3 *attachToContext(nvinfer1::IPluginResourceContext *) noexcept override { return clone(); }
    nvinfer1::PluginFieldCollection const *getFieldsToSerialize() noexcept override { return &mCollection; }

private:
    // `dimsOf` gives the dimensions of an input by its index.
    template <class DimsOf>
    static std::array<int64_t const *, kInputs> shapesOf(DimsOf &&dimsOf) {
        std::array<int64_t const *, kInputs> shapes;
        for (int32_t i = 0; i < kInputs; ++i) {
            shapes[i] = dimsOf(i).d;
        }
        return shapes;
    }

    static void checkCounts(int32_t nbInputs, int32_t nbOutputs) {
        if (nbInputs != kInputs || nbOutputs != kOutputs) {
            fail("expected ", kInputs, " inputs and ", kOutputs, " outputs, got ", nbInputs, " and ", nbOutputs);
        }
    }

    // Throws where a dimension is not known: a kernel would take -1 for a size and compute something else in silence.
    template <class DimsOf>
    static void checkKnown(DimsOf &&dimsOf) {
        for (int32_t i = 0; i < kInputs; ++i) {
            nvinfer1::Dims const &dims = dimsOf(i);
            for (int32_t axis = 0; axis < dims.nbDims; ++axis) {
                if (dims.d[axis] < 0) {
                    fail("input ", Operator::kInputs[i].name, " should have known dimensions, TensorRT told ",
                         dims.d[axis], " for axis ", axis);
                }
            }
        }
    }

    // Scratch memory for inputs of at most these dimensions.
    template <class DimsOf>
    size_t scratchBytes(DimsOf &&dimsOf, nvinfer1::DataType tokens) const {
        size_t bytes = 0;
        if constexpr (Operator::kMerges) {
            bytes = mOperator.workspace(kCuda, shapesOf(dimsOf).data(), tokenType(tokens));
            if (bytes == 0) {
                fail("inputs of these dimensions should need scratch memory, the kernels refuse them");
            }
            bytes += kCountBytes;
        }
        return bytes;
    }

    // `tokens` is the type of input 0, which all token ports share. A lone index is a row count, and size tensors are
    // INT32.
    static nvinfer1::DataType resolve(Port const &port, nvinfer1::DataType tokens) noexcept {
        switch (port.type) {
            case Type::kTokens: return tokens;
            case Type::kFloat: return nvinfer1::DataType::kFLOAT;
            case Type::kIndex: return port.rank == 0 ? nvinfer1::DataType::kINT32 : nvinfer1::DataType::kINT64;
            case Type::kLabels: return nvinfer1::DataType::kINT32;
        }
        return tokens;
    }

    static bool accepts(Port const &port, nvinfer1::DataType got, nvinfer1::DataType tokens) noexcept {
        return got == resolve(port, tokens) && (port.type != Type::kTokens || isTokenType(got));
    }

    static char const *expected(Port const &port) noexcept {
        return port.type == Type::kTokens ? "one of float32, float16, bfloat16"
                                          : nameOf(resolve(port, nvinfer1::DataType::kFLOAT));
    }

    static constexpr size_t kCountBytes = 256;  // of the INT64 count, as much as keeps what follows aligned

    Operator mOperator;
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
    std::string mDescription;
};

template <class Operator>
class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    Creator() {
        Operator op{};
        visitFields(op, [this](char const *name, void *, nvinfer1::PluginFieldType type, int32_t count) {
            mFields.emplace_back(name, nullptr, type, count);
        });
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    }

    nvinfer1::IPluginV3 *createPlugin(nvinfer1::AsciiChar const *, nvinfer1::PluginFieldCollection const *fields,
                                      nvinfer1::TensorRTPhase) noexcept override {
        nvinfer1::IPluginV3 *plugin = nullptr;
        guarded(Operator::kName, [&] {
            if (fields == nullptr) {
                fail("no attributes were given");
            }
            Operator op{};
            readFields(op, *fields);
            op.attributes(CheckAttribute{});
            plugin = new Plugin<Operator>{op};
        });
        return plugin;
    }

    nvinfer1::PluginFieldCollection const *getFieldNames() noexcept override { return &mCollection; }
    nvinfer1::AsciiChar const *getPluginName() const noexcept override { return Operator::kName; }
    nvinfer1::AsciiChar const *getPluginVersion() const noexcept override { return kVersion; }
    nvinfer1::AsciiChar const *getPluginNamespace() const noexcept override { return kNamespace; }

private:
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
};

}  // namespace algm

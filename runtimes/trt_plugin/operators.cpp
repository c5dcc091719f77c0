#include "operators.h"

namespace algm {

namespace {

// Tokens, sizes, map, length and the row count of a merge. The row count is a size tensor: the kernels write it on the
// device and TensorRT reads the other outputs' second dimension from it. Between nothing merged (`upper` rows) and
// everything merged, half is what TensorRT should tune for.
void mergedShapes(nvinfer1::DimsExprs const &tokens, nvinfer1::IDimensionExpr const *patches, nvinfer1::DimsExprs *out,
                  nvinfer1::IExprBuilder &builder) {
    constexpr int32_t kRows = 4;
    auto const *upper = tokens.d[1];
    auto const *half = builder.operation(nvinfer1::DimensionOperation::kCEIL_DIV, *upper, *builder.constant(2));
    auto const *rows = builder.declareSizeTensor(kRows, *half, *upper);
    if (rows == nullptr) {
        fail("TensorRT refused the size tensor for the row count");
    }
    out[0].d[0] = tokens.d[0];
    out[0].d[1] = rows;
    out[0].d[2] = tokens.d[2];
    out[1].d[0] = tokens.d[0];
    out[1].d[1] = rows;
    out[2].d[0] = tokens.d[0];
    out[2].d[1] = patches;
    out[3].d[0] = tokens.d[0];
}

std::array<nvinfer1::Dims, 5> dimsOf(Launch const &launch, size_t count) {
    std::array<nvinfer1::Dims, 5> dims{};
    for (size_t i = 0; i < count; ++i) {
        dims[i] = launch.inputDesc[i].dims;
    }
    return dims;
}

}  // namespace

// --- clap

void Clap::checkAttributes() const {
    expectWithin(grid[0], 1, kMaxAttribute, "grid");
    expectWithin(grid[1], 1, kMaxAttribute, "grid");
    expectWithin(window[0], 1, kMaxAttribute, "window");
    expectWithin(window[1], 1, kMaxAttribute, "window");
    expectWithin(prefix, 0, kMaxAttribute, "prefix");
    expectWithin(semantics, ALGM_SEMANTICS_CODE, ALGM_SEMANTICS_PAPER, "semantics");
    expectWithin(batch, ALGM_BATCH_PER_IMAGE, ALGM_BATCH_MIN, "batch");
    expectWithin(order, ALGM_ORDER_PUBLISHED, ALGM_ORDER_RASTER, "order");
}

void Clap::checkShapes(nvinfer1::Dims const *inputs) const {
    expectEqual(inputs[0].d[1], prefix + int64_t{grid[0]} * grid[1], "rows of tokens (prefix + grid)");
    expectEqual(inputs[1].d[0], inputs[0].d[0], "images of size");
    expectEqual(inputs[1].d[1], inputs[0].d[1], "rows of size");
}

void Clap::shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const {
    mergedShapes(in[0], builder.constant(int64_t{grid[0]} * grid[1]), out, builder);
}

algm_clap_params Clap::params(nvinfer1::Dims const *inputs, int32_t dtype) const {
    auto const *d = inputs[0].d;
    return {d[0], d[1], d[2], grid[0], grid[1], window[0], window[1], prefix, dtype, semantics, batch, order};
}

size_t Clap::workspace(nvinfer1::Dims const *inputs, int32_t dtype) const {
    auto const p = params(inputs, dtype);
    return algm_cuda_clap_workspace(&p);
}

void Clap::run(Launch const &launch) const {
    auto const p = params(dimsOf(launch, kInputs.size()).data(), tokenType(launch.inputDesc[0].type));
    check(
        algm_cuda_clap_decide(&p, launch.inputs[0], launch.in<float>(2), launch.out<int64_t>(2), launch.out<int64_t>(3),
                              launch.out<int64_t>(4), nullptr, launch.workspace, launch.stream),
        "deciding which windows merge");
    check(algm_cuda_clap_apply(&p, launch.inputs[0], launch.in<float>(1), launch.workspace, ALGM_ROWS_ON_DEVICE,
                               launch.outputs[0], launch.out<float>(1), launch.stream),
          "merging windows");
}

// --- gbm

void Gbm::checkAttributes() const {
    expectWithin(prefix, 0, kMaxAttribute, "prefix");
    expectWithin(mode, ALGM_MODE_ADAPTIVE, ALGM_MODE_FIXED, "mode");
    expectWithin(semantics, ALGM_SEMANTICS_CODE, ALGM_SEMANTICS_PAPER, "semantics");
    expectWithin(batch, ALGM_BATCH_PER_IMAGE, ALGM_BATCH_MIN, "batch");
    if (!(divisor > 0)) {
        fail("attribute divisor should be positive, got ", divisor);
    }
}

void Gbm::checkShapes(nvinfer1::Dims const *inputs) const {
    expectEqual(inputs[1].d[0], inputs[0].d[0], "images of size");
    expectEqual(inputs[1].d[1], inputs[0].d[1], "rows of size");
    expectEqual(inputs[2].d[0], inputs[0].d[0], "images of map");
    expectEqual(inputs[3].d[0], inputs[0].d[0], "images of length");
}

void Gbm::shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const {
    mergedShapes(in[0], in[2].d[1], out, builder);
}

algm_gbm_params Gbm::params(nvinfer1::Dims const *inputs, int32_t dtype) const {
    auto const *d = inputs[0].d;
    return {d[0], d[1], d[2], inputs[2].d[1], prefix, divisor, dtype, semantics, batch, mode};
}

size_t Gbm::workspace(nvinfer1::Dims const *inputs, int32_t dtype) const {
    auto const p = params(inputs, dtype);
    return algm_cuda_gbm_workspace(&p);
}

void Gbm::run(Launch const &launch) const {
    auto const p = params(dimsOf(launch, kInputs.size()).data(), tokenType(launch.inputDesc[0].type));
    check(algm_cuda_gbm_decide(&p, launch.inputs[0], launch.in<int64_t>(2), launch.in<int64_t>(3), launch.in<float>(4),
                               launch.out<int64_t>(2), launch.out<int64_t>(3), launch.out<int64_t>(4), nullptr,
                               launch.workspace, launch.stream),
          "deciding which tokens merge");
    check(algm_cuda_gbm_apply(&p, launch.inputs[0], launch.in<float>(1), launch.workspace, ALGM_ROWS_ON_DEVICE,
                              launch.outputs[0], launch.out<float>(1), launch.stream),
          "merging tokens");
}

// --- unmerge

void Unmerge::checkAttributes() const { expectWithin(prefix, 0, kMaxAttribute, "prefix"); }

void Unmerge::checkShapes(nvinfer1::Dims const *inputs) const {
    expectEqual(inputs[1].d[0], inputs[0].d[0], "images of map");
}

void Unmerge::shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &) const {
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = in[1].d[1];
    out[0].d[2] = in[0].d[2];
}

void Unmerge::run(Launch const &launch) const {
    auto const *d = launch.inputDesc[0].dims.d;
    algm_unmerge_params const p{
        d[0], d[1], d[2], launch.inputDesc[1].dims.d[1], prefix, tokenType(launch.inputDesc[0].type)};
    check(algm_cuda_unmerge(&p, launch.inputs[0], launch.in<int64_t>(1), launch.outputs[0], launch.stream),
          "giving every patch its token");
}

// --- label_map

void LabelMap::checkAttributes() const {
    expectWithin(prefix, 0, kMaxAttribute, "prefix");
    for (int32_t axis : {0, 1}) {
        expectWithin(grid[axis], 1, kMaxAttribute, "grid");
        expectWithin(size[axis], 1, kMaxAttribute, "size");
    }
}

void LabelMap::checkShapes(nvinfer1::Dims const *inputs) const {
    expectEqual(inputs[1].d[0], inputs[0].d[0], "images of map");
    expectEqual(inputs[1].d[1], int64_t{grid[0]} * grid[1], "patches of map (grid)");
}

void LabelMap::shapes(nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) const {
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = builder.constant(size[0]);
    out[0].d[2] = builder.constant(size[1]);
}

void LabelMap::run(Launch const &launch) const {
    auto const *d = launch.inputDesc[0].dims.d;
    algm_label_map_params const p{d[0],
                                  d[1],
                                  d[2],
                                  grid[0],
                                  grid[1],
                                  size[0],
                                  size[1],
                                  prefix,
                                  tokenType(launch.inputDesc[0].type),
                                  ALGM_LABEL_INT32};
    check(algm_cuda_label_map(&p, launch.inputs[0], launch.in<int64_t>(1), launch.outputs[0], launch.stream),
          "labelling pixels");
}

}  // namespace algm

// Shapes of the four operators' outputs as TensorRT is told them. All else about them is in ../shell.h.
#pragma once

#include "plugin.h"

namespace algm {

// Tokens, sizes, map, length and the row count of a merge. The row count is a size tensor: the kernels write it on the
// device and TensorRT reads the other outputs' second dimension from it. Between nothing merged (`upper` rows) and
// everything merged, half is what TensorRT should tune for.
inline void mergedShapes(nvinfer1::DimsExprs const &tokens, nvinfer1::IDimensionExpr const *patches,
                         nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) {
    constexpr int32_t kRows = 4;
    auto const *upper = tokens.d[1];
    auto const *half = builder.operation(nvinfer1::DimensionOperation::kCEIL_DIV, *upper, *builder.constant(2));
    auto const *rows = builder.declareSizeTensor(kRows, *half, *upper);
    if (rows == nullptr) {
        fail("TensorRT refused the size tensor for the row count");
    }
    for (int32_t i = 0; i < kRows; ++i) {
        out[i].d[0] = tokens.d[0];
    }
    out[0].d[1] = out[1].d[1] = rows;
    out[0].d[2] = tokens.d[2];
    out[2].d[1] = patches;
}

inline void outputShapes(Clap const &op, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &builder) {
    mergedShapes(in[0], builder.constant(int64_t{op.grid[0]} * op.grid[1]), out, builder);
}

inline void outputShapes(Gbm const &, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &builder) {
    mergedShapes(in[0], in[2].d[1], out, builder);
}

inline void outputShapes(Unmerge const &, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &) {
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = in[1].d[1];
    out[0].d[2] = in[0].d[2];
}

// TensorRT takes no 8-bit plugin output; the graph casts.
using Labels = LabelMap<ALGM_LABEL_INT32>;

inline void outputShapes(Labels const &op, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &builder) {
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = builder.constant(op.size[0]);
    out[0].d[2] = builder.constant(op.size[1]);
}

}  // namespace algm

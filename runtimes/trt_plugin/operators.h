// The operators as TensorRT knows them: the shapes of their outputs. All else about them is in ../shell.h.
#pragma once

#include "plugin.h"

namespace algm {

// A merge, told how many rows it usually leaves, prefix and padding counted: what comes after it is tuned for that many.
// 0: nobody has measured, and half of all rows will do.
template <class Operator>
struct Sized : Operator {
    int32_t usualRows{};

    template <class Visit>
    void attributes(Visit &&visit) {
        Operator::attributes(visit);
        visit("usual_rows", usualRows, 0);
    }
};

// Tokens, sizes, map, length and the row count of a merge. The row count is a size tensor: the kernels write it on the
// device and TensorRT reads the other outputs' second dimension from it. Neither the count to tune for nor the bound may
// derive from another merge's size tensor, so both are numbers, of the patches and not of the rows that come in.
template <class Operator>
void outputShapes(Sized<Operator> const &op, nvinfer1::DimsExprs const *in, nvinfer1::IDimensionExpr const &patches,
                  nvinfer1::DimsExprs *out, nvinfer1::IExprBuilder &builder) {
    using Operation = nvinfer1::DimensionOperation;
    constexpr int32_t kRows = 4;
    auto const *upper = builder.operation(Operation::kSUM, patches, *builder.constant(op.prefix));
    auto const *usual = op.usualRows > 0
                            ? builder.operation(Operation::kMIN, *builder.constant(op.usualRows), *upper)
                            : builder.operation(Operation::kCEIL_DIV, *upper, *builder.constant(2));
    auto const *rows = builder.declareSizeTensor(kRows, *usual, *upper);
    if (rows == nullptr) {
        fail("TensorRT refused the size tensor for the row count");
    }
    for (int32_t i = 0; i < kRows; ++i) {
        out[i].d[0] = in[0].d[0];
    }
    out[0].d[1] = out[1].d[1] = rows;
    out[0].d[2] = in[0].d[2];
    out[2].d[1] = &patches;
}

inline void outputShapes(Sized<Clap> const &op, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &builder) {
    outputShapes(op, in, *builder.constant(op.patches(nullptr)), out, builder);
}

inline void outputShapes(Sized<Gbm> const &op, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &builder) {
    outputShapes(op, in, *in[2].d[1], out, builder);
}

inline void outputShapes(Unmerge const &, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &) {
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = in[1].d[1];
    out[0].d[2] = in[0].d[2];
}

inline void outputShapes(DeformableAttention const &, nvinfer1::DimsExprs const *in, nvinfer1::DimsExprs *out,
                         nvinfer1::IExprBuilder &builder) {
    out[0].d[0] = in[0].d[0];
    out[0].d[1] = in[2].d[1];
    out[0].d[2] = builder.operation(nvinfer1::DimensionOperation::kPROD, *in[0].d[2], *in[0].d[3]);
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

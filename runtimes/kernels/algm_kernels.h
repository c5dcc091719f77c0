/* The token-merging kernels behind one C interface: no CUDA, TensorRT or ONNX Runtime type appears here.
 *
 * Every function exists twice with the same signature: algm_cpu_NAME works on host memory and ignores `stream`,
 * algm_cuda_NAME works on device memory and queues its work on `stream` (a cudaStream_t) without waiting for it.
 * Parameter structs are always host memory. Arrays are dense, row-major, and at least aligned to their element type
 * (16-byte alignment is faster). No device memory is allocated; scratch comes from the caller as `workspace`.
 *
 * Letters: B images, S rows of the sequence (prefix rows counted), N = grid_h * grid_w patches, P prefix rows (class
 * token, registers), D width, K classes, W = (grid_h / window_h) * (grid_w / window_w) windows.
 * Maps, lengths and counts are int64; sizes, thresholds and similarities are fp32; tokens are `dtype`. A length may hold
 * any number: below 0 it counts as 0, above S as S. Prefix rows exist whatever the length.
 *
 * Ragged rows: the B * S rows of an array are the images one behind the other, each in as many rows as its length, and
 * what is left behind the last. S then bounds no image. Lengths must be those that the images were laid out by; of a merge
 * they hold the prefix rows, and no more than P + N. The host refuses others; a device does not look.
 *
 * A merge is two calls, because one caller (ONNX Runtime) must know the new row count on the host before it allocates
 * the output, and another (TensorRT) learns it on the device:
 *   decide  similarities, who merges, new row numbers: writes map, length, the row count S', and a plan in `workspace`
 *   apply   weighted means of tokens and sizes by that plan (the same, untouched workspace, tokens and sizes)
 * For ONNX Runtime: decide, copy `rows` to the host, allocate, apply with out_rows = S', or in CUDA graphs with -32. For
 * TensorRT: decide and apply with out_rows = ALGM_ROWS_ON_DEVICE.
 *
 * Every result is the same bits on every run: ties go to the lower index, sums have a fixed order.
 */
#ifndef ALGM_KERNELS_H
#define ALGM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ALGM_API __declspec(dllexport)
#else
#define ALGM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a signature, a struct or an enum value changes. */
#define ALGM_KERNELS_VERSION 5

/* Return values. A failed CUDA call returns ALGM_DEVICE_ERROR + its cudaError_t, and cudaGetLastError forgets it. */
enum {
    ALGM_OK = 0,
    ALGM_INVALID_ARGUMENT = 1, /* sizes that contradict each other, an unknown enum value, or a null pointer */
    ALGM_UNSUPPORTED = 2,      /* valid, but larger than the kernels can index */
    ALGM_INVALID_MAP = 3,      /* CPU only: a map entry names a row that does not exist (CUDA reads zeros there) */
    ALGM_OUT_OF_MEMORY = 4,    /* CPU only: there is no memory for what a thread works with */
    ALGM_DEVICE_ERROR = 1000
};

/* dtype of tokens, values and scores */
enum { ALGM_FLOAT32 = 0, ALGM_FLOAT16 = 1, ALGM_BFLOAT16 = 2 };
/* semantics: the published program (>=, size-weighted means) or the paper's text (>, plain means in gbm) */
enum { ALGM_SEMANTICS_CODE = 0, ALGM_SEMANTICS_PAPER = 1 };
/* batch_mode: every image decides alone, or all images merge as many rows as the one with the fewest */
enum { ALGM_BATCH_PER_IMAGE = 0, ALGM_BATCH_MIN = 1 };
/* order: merged windows by descending similarity, or by position */
enum { ALGM_ORDER_PUBLISHED = 0, ALGM_ORDER_RASTER = 1 };
/* rule: who merges. clap: what reaches the threshold. gbm: what reaches mean + threshold * deviation / divisor of the
 * best similarities, or threshold itself. Either: the `budget` most similar windows, or rows, of every image, no more than
 * there are; then the threshold may be a null pointer, and semantics and batch_mode do not change who merges. */
enum { ALGM_RULE_THRESHOLD = 0, ALGM_RULE_ADAPTIVE = 1, ALGM_RULE_FIXED = 2, ALGM_RULE_BUDGET = 3 };
/* ragged, of a merge: whether its tokens and sizes lie so, and whether its results do; the sum of both */
enum { ALGM_RAGGED_IN = 1, ALGM_RAGGED_OUT = 2 };
/* label_type */
enum { ALGM_LABEL_UINT8 = 0, ALGM_LABEL_INT32 = 1 };

/* Value of out_rows: the output has exactly the S' rows that decide counted, a number that only the device knows. -n for
 * the next multiple of n instead, but no more than S. */
#define ALGM_ROWS_ON_DEVICE (-1)

typedef struct {
    int64_t batch, rows, width; /* B, S = prefix + grid_h * grid_w, D */
    int64_t grid_h, grid_w;     /* patches */
    int64_t window_h, window_w; /* patches; at least two patches in a window */
    int64_t prefix;
    int64_t budget; /* by rule: windows that merge */
    int32_t dtype, semantics, batch_mode, order, rule;
    int32_t ragged; /* 0 or ALGM_RAGGED_OUT */
} algm_clap_params;

typedef struct {
    int64_t batch, rows, width; /* B, S (padding counted), D */
    int64_t patches;            /* N, the length of one image's map */
    int64_t prefix;
    int64_t budget;             /* by rule: rows of set A that merge */
    double divisor;             /* adaptive threshold: mean + threshold * deviation / divisor */
    int32_t dtype, semantics, batch_mode, rule;
    int32_t ragged;
} algm_gbm_params;

typedef struct {
    int64_t batch, rows, width; /* B, S of `values`, C */
    int64_t patches;            /* N */
    int64_t prefix;             /* leading rows that the map counts and `values` no longer has */
    int32_t dtype;
} algm_unmerge_params;

typedef struct {
    int64_t batch, rows, classes; /* B, S of `scores`, K */
    int64_t grid_h, grid_w;       /* patches */
    int64_t height, width;        /* pixels of a picture */
    int64_t first, lines;         /* the lines of every picture that are labelled, no others */
    int64_t prefix;               /* leading rows that the map counts and `scores` no longer has */
    int32_t dtype, label_type;    /* label_type uint8 holds classes 0 to 255 */
} algm_label_map_params;

typedef struct {
    int64_t batch, queries, classes; /* B, Q, K */
    int64_t grid_h, grid_w;          /* cells of a mask */
    int64_t height, width;           /* pixels of a picture */
    int64_t first, lines;            /* the lines of every picture that are labelled, no others */
    int32_t dtype, label_type;       /* of masks; label_type uint8 holds classes 0 to 255 */
} algm_mask_labels_params;

/* Most levels that deformable attention looks at. */
#define ALGM_MAX_LEVELS 8

typedef struct {
    int64_t batch, cells, heads, width; /* B, M = the cells of all levels, H, D of a head */
    int64_t queries, levels, points;    /* Q, L, places P of a query and head in each level */
    int32_t sides[16];                  /* rows and columns of the levels; those of ALGM_MAX_LEVELS have room */
    int32_t dtype;
} algm_deformable_attention_params;

typedef struct {
    int64_t images, rows; /* B, S */
    int64_t heads, side;  /* H, and the width of a head: D = H * side */
    float scale;          /* of the products of queries and keys */
    int32_t dtype;
    int32_t ragged; /* 0, or 1 for ragged rows, which need lengths */
} algm_attention_params;

typedef struct {
    int64_t images, rows, width; /* B, S and C of ragged values */
    int64_t skip, put;           /* leading rows of every image that go, and rows that come in their place */
    int32_t dtype;
} algm_reframe_params;

typedef struct {
    int64_t images, rows, width; /* B, S and C of ragged values */
    int64_t first, count;        /* rows of every image: where they begin, and how many */
    int32_t dtype;
} algm_apart_params;

typedef struct {
    int64_t rows, width; /* of all images together; C */
    int32_t dtype;
} algm_gelu_params;

typedef struct {
    int64_t rows, width; /* of all images together; D */
    float epsilon;
    int32_t dtype;
} algm_bias_skip_norm_params;

typedef struct {
    int64_t images, height, width, side; /* B, H and W as multiples of the side of a patch */
    float centre, scale;                 /* a pixel becomes (pixel - centre) * scale */
    int32_t dtype;
} algm_patches_params;

/* Declares a function once for the host and once for the device. */
#define ALGM_BOTH(result, name, arguments) \
    ALGM_API result algm_cpu_##name arguments; \
    ALGM_API result algm_cuda_##name arguments;

/* One English sentence for a return value; static storage. */
ALGM_BOTH(const char *, status_text, (int status))

/* ---- clap: merge the windows whose patches resemble each other ------------------------------------------------- */

/* Bytes of workspace for decide and apply; grows with batch and rows, so the largest shape serves all smaller ones. */
ALGM_BOTH(size_t, clap_workspace, (const algm_clap_params *params))

/* tokens (B,S,D) -> similarity (B,W): mean cosine over the pairs of a window. Not needed before clap_decide. */
ALGM_BOTH(int, clap_similarity,
          (const algm_clap_params *params, const void *tokens, float *similarity, void *stream))

/* tokens (B,S,D), threshold () -> map (B,N), length (B), rows () = S' = the longest length, and the plan.
 * rows_int32 (), if not null, receives S' once more as int32. For ragged results the rows of all images together are
 * counted instead, and every image of the output needs room for a B-th of them, rounded up. */
ALGM_BOTH(int, clap_decide,
          (const algm_clap_params *params, const void *tokens, const float *threshold, int64_t *map, int64_t *length,
           int64_t *rows, int32_t *rows_int32, void *workspace, void *stream))

/* The same decision on similarities (B,W) that the caller gives. */
ALGM_BOTH(int, clap_decide_given,
          (const algm_clap_params *params, const float *similarity, const float *threshold, int64_t *map,
           int64_t *length, int64_t *rows, int32_t *rows_int32, void *workspace, void *stream))

/* tokens (B,S,D), size (B,S) -> out_tokens (B,out_rows,D), out_size (B,out_rows); rows past an image's length are 0.
 * out_rows is at least S', or below zero for what ALGM_ROWS_ON_DEVICE says (the buffers then hold at least that). Fewer
 * rows are refused on the host. On a device, where only the kernel learns S', nothing is written past them, and all of them
 * become NaN. A mean follows IEEE arithmetic: Inf from a member that is infinite, NaN from two that differ in sign.
 * Ragged results: for S' stands the mean of the images' rows, rounded up. */
ALGM_BOTH(int, clap_apply,
          (const algm_clap_params *params, const void *tokens, const float *size, const void *workspace,
           int64_t out_rows, void *out_tokens, float *out_size, void *stream))

/* ---- gbm: merge each row of set A into the row of set B that it resembles most ----------------------------------- */

ALGM_BOTH(size_t, gbm_workspace, (const algm_gbm_params *params))

/* Most rows of set A that a sequence of `rows` rows has: the second dimension A of `best` and `best_row`. */
ALGM_BOTH(int64_t, gbm_candidates, (const algm_gbm_params *params))

/* tokens (B,S,D), length (B) -> best (B,A): largest cosine of the i-th allowed row of set A with an allowed row of set
 * B; best_row (B,A): that row's index in the sequence. Entries past an image's rows, or without any row to join, hold
 * -infinity and -1. Not needed before gbm_decide. Uses the workspace. */
ALGM_BOTH(int, gbm_similarity,
          (const algm_gbm_params *params, const void *tokens, const int64_t *length, float *best, int32_t *best_row,
           void *workspace, void *stream))

/* tokens (B,S,D), map (B,N), length (B), threshold () -> out_map (B,N) composed, out_length (B), rows () = S'', plan.
 * The outputs overlap none of the inputs. */
ALGM_BOTH(int, gbm_decide,
          (const algm_gbm_params *params, const void *tokens, const int64_t *map, const int64_t *length,
           const float *threshold, int64_t *out_map, int64_t *out_length, int64_t *rows, int32_t *rows_int32,
           void *workspace, void *stream))

/* The same decision on best (B,A) and best_row (B,A) that the caller gives. */
ALGM_BOTH(int, gbm_decide_given,
          (const algm_gbm_params *params, const float *best, const int32_t *best_row, const int64_t *map,
           const int64_t *length, const float *threshold, int64_t *out_map, int64_t *out_length, int64_t *rows,
           int32_t *rows_int32, void *workspace, void *stream))

/* As clap_apply; length (B) as given to the decision, which only ragged tokens need. From ragged tokens to images that lie
 * apart, out_rows is not below zero: S does not say how many rows the longest image has. */
ALGM_BOTH(int, gbm_apply,
          (const algm_gbm_params *params, const void *tokens, const float *size, const int64_t *length,
           const void *workspace, int64_t out_rows, void *out_tokens, float *out_size, void *stream))

/* ---- inside ViT-Adapter and Mask2Former -------------------------------------------------------------------------- */

/* value (B,M,H,D), locations (B,Q,H,L,P,2) fp32 as (across, down) in [0, 1] of a level, shares (B,Q,H,L,P) fp32
 * -> out (B,Q,H*D): the sum of what is found at the places by their shares, bilinear between cell centres, zero
 * outside. Places and sums are fp32. A place or share that is NaN makes its query's head NaN; a value that is not finite
 * reaches those that look at its cell, be it with a share of zero. */
ALGM_BOTH(int, deformable_attention,
          (const algm_deformable_attention_params *params, const void *value, const float *locations,
           const float *shares, void *out, void *stream))

/* ---- CUDA graphs of a whole network ----------------------------------------------------------------------------- */

/* What comes behind a merge: the graph (cudaGraph_t) of the first choice that has room for the rows which `length`, in
 * device memory, holds by then, or of the last choice. `rows` (choices) ascend. */
typedef struct {
    const int64_t *length;
    int64_t choices;
    const int64_t *rows;
    void *const *graphs;
} algm_switch;

/* `first` and then `count` switches as one graph, joined (cudaGraphExec_t), on the current device: what comes next is
 * decided there, and no host waits for a length. The graphs are copied; the memory and code they use has to stay.
 * ALGM_UNSUPPORTED: a library built with CUDA before 12.8, or more than 256 choices; older drivers refuse with an error
 * of their own. */
ALGM_API int algm_cuda_join(void *first, const algm_switch *switches, int64_t count, void **joined);
ALGM_API int algm_cuda_launch_joined(void *joined, void *stream);
/* Behind all launches. */
ALGM_API int algm_cuda_free_joined(void *joined);

/* ---- before the merges ------------------------------------------------------------------------------------------ */

/* image (B,3,H,W) -> out (B,N,3*side*side): pixels of each patch, [channel][down][across], centred and scaled in fp32. */
ALGM_BOTH(int, patches, (const algm_patches_params *params, const void *image, void *out, void *stream))

/* ---- between the merges ----------------------------------------------------------------------------------------- */

/* product (B,S,3D), bias (3D) in fp32, length (B) -> out (B,S,D): self-attention within each image. A row of product is
 * [query | key | value], each [head][side], of a linear layer without its bias, which may be a null pointer. Without
 * lengths all rows exist; rows of `out` that no image has are zeros. */
ALGM_BOTH(int, attention,
          (const algm_attention_params *params, const void *product, const float *bias, const int64_t *length,
           void *out, void *stream))

/* Ragged values (B,S,C), length (B), front (put,C) in fp32 -> ragged out (B, S - skip + put, C): every image without its
 * `skip` leading rows, behind the rows of `front`, which may be a null pointer if there are none. */
ALGM_BOTH(int, reframe,
          (const algm_reframe_params *params, const void *values, const int64_t *length, const float *front, void *out,
           void *stream))

/* Ragged values (B,S,C), length (B) -> out (B,count,C): rows first, first + 1, ... of every image, zeros for those that
 * it does not have. */
ALGM_BOTH(int, apart,
          (const algm_apart_params *params, const void *values, const int64_t *length, void *out, void *stream))

/* product (rows,C) + bias (C) in fp32 -> its GELU: out (rows,C), which may be the product itself. */
ALGM_BOTH(int, gelu,
          (const algm_gelu_params *params, const void *product, const float *bias, void *out, void *stream))

/* residual (rows,D) + (product (rows,D) + bias (D) in fp32) -> total (rows,D), rounded once, and its layer normalisation
 * with weight (D) and shift (D) in fp32: normed (rows,D). Null pointers leave out a half: bias, residual and total, all
 * three, and the product is normalised; or weight, shift and normed, and there is only the sum. */
ALGM_BOTH(int, bias_skip_norm,
          (const algm_bias_skip_norm_params *params, const void *product, const float *bias, const void *residual,
           const float *weight, const float *shift, void *normed, void *total, void *stream))

/* ---- after the network ------------------------------------------------------------------------------------------ */

/* values (B,S,C), map (B,N) -> out (B,N,C): row map - prefix for every patch. */
ALGM_BOTH(int, unmerge,
          (const algm_unmerge_params *params, const void *values, const int64_t *map, void *out, void *stream))

/* scores (B,S,K), map (B,N) -> labels (B,lines,width): unmerge, bilinear resize with half-pixel centres
 * (align_corners=False), argmax with ties to the lower class; the full-size scores never exist. A class with an
 * infinite score or a NaN never wins around it. */
ALGM_BOTH(int, label_map,
          (const algm_label_map_params *params, const void *scores, const int64_t *map, void *labels, void *stream))

/* masks (B,Q,grid_h,grid_w), classes (B,Q,K) fp32, probabilities -> labels (B,lines,width): for every pixel the class of the
 * highest sum over the queries of probability * sigmoid(mask), masks resized as in label_map, the lower class on ties. Sums
 * agree with those in fp32 within 2^-15 of themselves, and what is below 1e-37 may be zero; no mask and no sum of the size
 * of the picture ever exists. Masks that are not finite, or probabilities that are none, make any label around them. */
ALGM_BOTH(int, mask_labels,
          (const algm_mask_labels_params *params, const void *masks, const float *classes, void *labels, void *stream))

#undef ALGM_BOTH

#ifdef __cplusplus
}
#endif

#endif /* ALGM_KERNELS_H */

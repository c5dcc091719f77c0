// CUDA graphs joined into one, in which the device decides what comes next.
#include "device.cuh"

using namespace algm;
using namespace algm::cuda;

#if CUDART_VERSION >= 12080

namespace {

constexpr int kMostChoices = 256;  // a kilobyte of the 4 that parameters of a kernel have

struct Choices {
    int count, rows[kMostChoices];

    explicit Choices(const algm_switch &one) : count(static_cast<int>(one.choices)) {
        for (int i = 0; i < count; ++i) rows[i] = static_cast<int>(one.rows[i] < INT32_MAX ? one.rows[i] : INT32_MAX);
    }
};

// One thread a choice, of which one is the first with room.
__global__ void choose_kernel(cudaGraphConditionalHandle handle, const int64_t *length, Choices choices) {
    const int i = threadIdx.x;
    const int64_t rows = *length;
    const bool has_room = i == choices.count - 1 || rows <= choices.rows[i];
    if (has_room && (i == 0 || rows > choices.rows[i - 1])) cudaGraphSetConditional(handle, static_cast<unsigned>(i));
}

int add_node(cudaGraphNode_t *node, cudaGraph_t graph, cudaGraphNode_t before, cudaGraphNodeParams *params) {
#if CUDART_VERSION >= 13000
    return status_of(cudaGraphAddNode(node, graph, &before, nullptr, 1, params));
#else
    return status_of(cudaGraphAddNode(node, graph, &before, 1, params));
#endif
}

// Adds a switch behind `last`, which becomes the switch.
int add_switch(cudaGraph_t graph, const algm_switch &one, cudaGraphNode_t *last) {
    cudaGraphConditionalHandle handle{};
    if (const int status = status_of(cudaGraphConditionalHandleCreate(&handle, graph, 0, 0))) return status;
    Choices choices(one);
    const int64_t *length = one.length;
    void *arguments[] = {&handle, &length, &choices};
    cudaGraphNodeParams choose = {};
    choose.type = cudaGraphNodeTypeKernel;
    choose.kernel.func = reinterpret_cast<void *>(choose_kernel);
    choose.kernel.gridDim = dim3(1);
    choose.kernel.blockDim = dim3(static_cast<unsigned>(choices.count));
    choose.kernel.kernelParams = arguments;
    if (const int status = add_node(last, graph, *last, &choose)) return status;
    cudaGraphNodeParams bodies = {};
    bodies.type = cudaGraphNodeTypeConditional;
    bodies.conditional.handle = handle;
    bodies.conditional.type = cudaGraphCondTypeSwitch;
    bodies.conditional.size = static_cast<unsigned>(choices.count);
    if (const int status = add_node(last, graph, *last, &bodies)) return status;
    for (int i = 0; i < choices.count; ++i) {
        cudaGraphNode_t body{};
        const auto chosen = static_cast<cudaGraph_t>(one.graphs[i]);
        const cudaError_t error =
            cudaGraphAddChildGraphNode(&body, bodies.conditional.phGraph_out[i], nullptr, 0, chosen);
        if (error != cudaSuccess) return status_of(error);
    }
    return ALGM_OK;
}

int fill(cudaGraph_t graph, void *first, const algm_switch *switches, int64_t count) {
    cudaGraphNode_t last{};
    const cudaError_t error = cudaGraphAddChildGraphNode(&last, graph, nullptr, 0, static_cast<cudaGraph_t>(first));
    int status = status_of(error);
    for (int64_t i = 0; status == ALGM_OK && i < count; ++i) status = add_switch(graph, switches[i], &last);
    return status;
}

}  // namespace

int algm_cuda_join(void *first, const algm_switch *switches, int64_t count, void **joined) {
    if (any_null(first, switches, joined) || count < 1) return ALGM_INVALID_ARGUMENT;
    for (int64_t i = 0; i < count; ++i) {
        const algm_switch &one = switches[i];
        if (any_null(one.length, one.rows, one.graphs) || one.choices < 1) return ALGM_INVALID_ARGUMENT;
        if (one.choices > kMostChoices) return ALGM_UNSUPPORTED;
    }
    cudaGraph_t graph{};
    if (const int status = status_of(cudaGraphCreate(&graph, 0))) return status;
    int status = fill(graph, first, switches, count);
    cudaGraphExec_t executable{};
    if (status == ALGM_OK) status = status_of(cudaGraphInstantiate(&executable, graph, 0));
    cudaGraphDestroy(graph);
    *joined = executable;
    return status;
}

int algm_cuda_launch_joined(void *joined, void *stream) {
    if (joined == nullptr) return ALGM_INVALID_ARGUMENT;
    return status_of(cudaGraphLaunch(static_cast<cudaGraphExec_t>(joined), stream_of(stream)));
}

int algm_cuda_free_joined(void *joined) {
    return joined == nullptr ? ALGM_OK : status_of(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(joined)));
}

#else

int algm_cuda_join(void *, const algm_switch *, int64_t, void **) { return ALGM_UNSUPPORTED; }
int algm_cuda_launch_joined(void *, void *) { return ALGM_UNSUPPORTED; }
int algm_cuda_free_joined(void *) { return ALGM_UNSUPPORTED; }

#endif

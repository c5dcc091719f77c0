// Pixels as rows, one a patch.
#include "device.cuh"

using namespace algm;
using namespace algm::cuda;

namespace {

constexpr int kThreads = 256;

// A thread moves neighbouring pixels of one line, in the order in which the picture has them.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    patches_kernel(unsigned packs, unsigned height, unsigned width, unsigned side, float centre, float scale,
                   const T *image, T *out) {
    const unsigned index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= packs) return;
    Pack<T, V> pixels = load_pack<T, V>(image, index);
    const unsigned line = index * V / width, x = index * V % width, plane = line / height, y = line % height;
    const unsigned patch = (plane / kChannels * (height / side) + y / side) * (width / side) + x / side;
    const unsigned at = ((patch * kChannels + plane % kChannels) * side + y % side) * side + x % side;
#pragma unroll
    for (int v = 0; v < V; ++v) pixels.value[v] = from_float<T>((to_float(pixels.value[v]) - centre) * scale);
    reinterpret_cast<Pack<T, V> *>(out)[at / V] = pixels;
}

}  // namespace

int algm_cuda_patches(const algm_patches_params *params, const void *image, void *out, void *stream) {
    if (const int status = check(params)) return status;
    if (any_null(image, out)) return ALGM_INVALID_ARGUMENT;
    const algm_patches_params &p = *params;
    return with_dtype(p.dtype, p.side, is_aligned(image) && is_aligned(out), [&](auto type, auto pack) {
        using T = decltype(type);
        constexpr int V = decltype(pack)::value;
        const int64_t packs = p.images * kChannels * p.height * p.width / V;
        return start(patches_kernel<T, V>, {dim3(static_cast<unsigned>(ceil_div(packs, kThreads))), kThreads}, stream,
                     static_cast<unsigned>(packs), static_cast<unsigned>(p.height), static_cast<unsigned>(p.width),
                     static_cast<unsigned>(p.side), p.centre, p.scale, static_cast<const T *>(image),
                     static_cast<T *>(out));
    });
}

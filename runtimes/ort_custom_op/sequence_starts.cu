// What attention over packed sequences is told on the device; see SequenceStarts in operators.h.
#include <algm_kernels.h>
#include <cuda_runtime_api.h>

namespace algm {

namespace {

__global__ void sequence_starts_kernel(int64_t const* length, int64_t images, int64_t rows, int32_t* starts) {
    for (int64_t image = threadIdx.x; image <= images; image += blockDim.x) {
        starts[2 * image] = static_cast<int32_t>(image * rows);
        if (image < images) starts[2 * image + 1] = static_cast<int32_t>(image * rows + length[image]);
    }
}

}  // namespace

int deviceSequenceStarts(int64_t const* length, int64_t images, int64_t rows, int32_t* starts, void* stream) {
    sequence_starts_kernel<<<1, 128, 0, static_cast<cudaStream_t>(stream)>>>(length, images, rows, starts);
    cudaError_t const error = cudaGetLastError();
    return error == cudaSuccess ? ALGM_OK : ALGM_DEVICE_ERROR + error;
}

}  // namespace algm

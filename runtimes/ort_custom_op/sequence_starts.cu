// What attention over packed sequences is told on the device; see SequenceStarts in operators.h.
#include <cuda/device.cuh>

namespace algm {

namespace {

__global__ void sequence_starts_kernel(int64_t const* length, int64_t images, int64_t rows, int32_t* starts) {
    for (int64_t image = threadIdx.x; image <= images; image += blockDim.x) {
        starts[2 * image] = static_cast<int32_t>(image * rows);
        if (image < images)
            starts[2 * image + 1] = static_cast<int32_t>(image * rows + existing_rows(length[image], rows));
    }
}

}  // namespace

int deviceSequenceStarts(int64_t const* length, int64_t images, int64_t rows, int32_t* starts, void* stream) {
    return cuda::start(sequence_starts_kernel, {dim3(1), 128}, stream, length, images, rows, starts);
}

}  // namespace algm

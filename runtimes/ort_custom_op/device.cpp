// Device memory and waiting for the CUDA provider.
#include <cuda_runtime_api.h>

#include <mutex>

#include "call.h"

namespace algm {

// sequence_starts.cu
int deviceSequenceStarts(int64_t const* length, int64_t images, int64_t rows, int32_t* starts, void* stream);

namespace {

void checkCuda(cudaError_t error, char const* what) {
    if (error != cudaSuccess) {
        fail(what, ": ", cudaGetErrorString(error));
    }
}

// A pool that keeps its memory: the driver's default pool gives everything back whenever a stream is waited for, and
// each merge waits once.
cudaMemPool_t pool() {
    constexpr int kDevices = 64;
    static cudaMemPool_t pools[kDevices]{};
    int device{};
    checkCuda(cudaGetDevice(&device), "asking for the device");
    if (device >= kDevices) {
        fail("expected at most ", kDevices, " devices, got number ", device);
    }
    static std::mutex mutex;
    std::lock_guard<std::mutex> const lock(mutex);
    if (pools[device] == nullptr) {
        cudaMemPoolProps props{};
        props.allocType = cudaMemAllocationTypePinned;
        props.location.type = cudaMemLocationTypeDevice;
        props.location.id = device;
        checkCuda(cudaMemPoolCreate(&pools[device], &props), "creating a memory pool");
        uint64_t keep = UINT64_MAX;
        checkCuda(cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &keep), "keeping memory");
    }
    return pools[device];
}

Scratch deviceScratch(size_t bytes, void* stream) {
    void* memory{};
    checkCuda(cudaMallocFromPoolAsync(&memory, bytes, pool(), static_cast<cudaStream_t>(stream)), "taking memory");
    return {memory, {[](void* taken, void* order) { cudaFreeAsync(taken, static_cast<cudaStream_t>(order)); }, stream}};
}

// Page-locked, so that the kernel itself writes the count where the host reads it. A thread waits for its count before
// it starts another merge.
struct PinnedCount {
    int64_t* value{};

    PinnedCount() { checkCuda(cudaMallocHost(reinterpret_cast<void**>(&value), sizeof *value), "taking page-locked memory"); }
    ~PinnedCount() { cudaFreeHost(value); }
};

int64_t* pinnedCount() {
    static thread_local PinnedCount count;
    return count.value;
}

void waitFor(void* stream) { checkCuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "merging"); }

}  // namespace

Backend const kCuda{"CUDAExecutionProvider", deviceScratch, pinnedCount, waitFor, deviceSequenceStarts,
                    ALGM_KERNELS_OF(cuda)};

}  // namespace algm

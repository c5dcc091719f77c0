// Device memory and waiting for the CUDA provider, and where cuBLAS works in captured runs.
#include <cuda_runtime_api.h>

#include <mutex>
#include <unordered_map>
#include <vector>

#include "call.h"

namespace algm {

namespace {

// Throws for a call that failed, whose error no later call may find and take for its own.
void checkCuda(cudaError_t error, char const* what) {
    if (error != cudaSuccess) {
        cudaGetLastError();
        fail(what, ": ", cudaGetErrorString(error));
    }
}

// Where somebody captures a CUDA graph in the strictest mode, as ONNX Runtime itself does, taking memory fails in every
// thread and breaks the graph, except in threads that say that what they take has nothing to do with it.
class BesideCaptures {
public:
    BesideCaptures() { exchange(); }
    ~BesideCaptures() { exchange(); }
    BesideCaptures(BesideCaptures const&) = delete;

private:
    void exchange() { cudaThreadExchangeStreamCaptureMode(&mode_); }

    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

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
        BesideCaptures const beside;
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

// Where counts are written: page-locked, so that the kernel itself writes where the host reads. What a thread leaves
// goes to the next one and never back to the driver, which would break a graph that another thread captures.
class Counts {
public:
    int64_t* take() {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (free_.empty()) {
            grow();
        }
        int64_t* const count = free_.back();
        free_.pop_back();
        return count;
    }

    void giveBack(int64_t* count) {
        std::lock_guard<std::mutex> const lock(mutex_);
        free_.push_back(count);
    }

private:
    void grow() {
        constexpr size_t kPage = 4096, kApart = 64;  // a line of the processor's cache each
        BesideCaptures const beside;
        void* page{};
        checkCuda(cudaHostAlloc(&page, kPage, cudaHostAllocPortable), "taking page-locked memory");
        for (size_t offset = 0; offset < kPage; offset += kApart) {
            free_.push_back(reinterpret_cast<int64_t*>(static_cast<char*>(page) + offset));
        }
    }

    std::mutex mutex_;
    std::vector<int64_t*> free_;
};

// Lives as long as the process: threads end in any order.
Counts& counts() {
    static Counts* const all = new Counts;
    return *all;
}

// A thread waits for its count before it starts another merge.
struct ThreadCount {
    int64_t* const value = counts().take();

    ~ThreadCount() { counts().giveBack(value); }
};

int64_t* pinnedCount() {
    static thread_local ThreadCount count;
    return count.value;
}

using SetWorkspace = int (*)(void* handle, void* memory, size_t bytes);

// Where cuBLAS works on a stream that is captured: by stream what `algm_lend_workspace` was told.
class Workspaces {
public:
    void lend(void* stream, void* memory, size_t bytes, SetWorkspace set) {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (memory == nullptr) {
            lent_.erase(stream);
        } else {
            lent_[stream] = {memory, bytes, set};
        }
    }

    // Hands what was lent for the stream to the cuBLAS of this run. Not in captured runs alone: what a session keeps from
    // the run before serves the products that come before the first of these operators.
    void use(OrtApi const& api, OrtKernelContext* context, void* stream) {
        std::lock_guard<std::mutex> const lock(mutex_);
        auto const found = lent_.find(stream);
        if (found == lent_.end()) {
            return;
        }
        // As ONNX Runtime numbers its resources: `cublas_handle_t` of version 3.
        constexpr int kVersion = 3, kCublasHandle = 10002;
        void* handle{};
        check(api, api.KernelContext_GetResource(context, kVersion, kCublasHandle, &handle));
        Lent const& lent = found->second;
        if (int const failed = lent.set(handle, lent.memory, lent.bytes)) {
            fail("lending memory to cuBLAS failed with status ", failed);
        }
    }

private:
    struct Lent {
        void* memory;
        size_t bytes;
        SetWorkspace set;
    };

    std::mutex mutex_;
    std::unordered_map<void*, Lent> lent_;
};

Workspaces& workspaces() {
    static Workspaces* const all = new Workspaces;
    return *all;
}

void begin(OrtApi const& api, OrtKernelContext* context, void* stream) { workspaces().use(api, context, stream); }

void waitFor(void* stream) { checkCuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "merging"); }

}  // namespace

Backend const kCuda{"CUDAExecutionProvider", deviceScratch, pinnedCount, waitFor, begin, ALGM_KERNELS_OF(cuda)};

}  // namespace algm

// Lends memory of the device to the products on a stream that is captured, for as long as its graphs are used; no memory
// takes it back. `set` is the cublasSetWorkspace of the cuBLAS that ONNX Runtime calls. cuBLAS would else take
// memory within the graph, by nodes that keep it from becoming part of another graph.
extern "C" ALGM_API void algm_lend_workspace(void* stream, void* memory, size_t bytes, int (*set)(void*, void*, size_t)) {
    algm::workspaces().lend(stream, memory, bytes, set);
}

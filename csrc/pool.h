// A small thread pool for loops whose chunks take microseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace obole {

// Chunks are handed out one at a time, to the caller as well, which therefore never waits for a thread that has not
// started: a busy neighbour costs at most the chunk it holds. Workers spin for a short while after a loop, then sleep.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // body(i) for every i in [0, n), in any order, on any thread; returns when all are done. `body` must not throw.
    // Of two callers at a time one has the workers and the other runs alone.
    template <class Body>
    void run(int64_t n, Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        run(n, [](void* context, int64_t i) { (*static_cast<Plain*>(context))(i); }, &body);
    }

private:
    using Function = void (*)(void*, int64_t);

    void run(int64_t n, Function function, void* context);
    void work();
    bool take_one(uint32_t epoch);

    // Epoch of the loop (high half) and chunks not yet taken (low half). The fields below are written before a new
    // epoch is published, when no chunk of the old one is left; who has taken a chunk may read them until it is done.
    std::atomic<uint64_t> ticket_{0};
    Function function_ = nullptr;
    void* context_ = nullptr;
    int64_t chunks_ = 0;
    std::atomic<int64_t> unfinished_{0};

    std::mutex busy_;  // held by the caller whose loop it is
    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace obole

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

// Each thread has a share of the chunks and takes them one at a time, in order, from memory that is its own; who is done
// goes on with the others' shares. So a busy neighbour costs at most the chunk it holds, the caller never waits for a
// thread that has not started, and threads that are on time hardly touch each other's cache lines. Workers spin for a
// short while after a loop, then sleep.
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

    // Chunks [first, first + count) of a loop. `ticket` holds the loop's epoch (high half) and how many of them are not
    // yet taken (low half). The rest is written before a new epoch is published, when no chunk of the old one is left;
    // who has taken a chunk may read it until that is done.
    struct alignas(64) Share {
        std::atomic<uint64_t> ticket{0};
        int64_t first = 0, count = 0;
    };

    void run(int64_t n, Function function, void* context);
    void stop();
    void work(size_t own);
    void take_part(size_t own, uint32_t epoch);

    std::vector<Share> shares_;  // the caller's is the first
    Function function_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int64_t> unfinished_{0};

    alignas(64) std::mutex busy_;  // held by the caller whose loop it is
    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace obole

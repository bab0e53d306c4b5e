#include "pool.h"

#include <chrono>

namespace obole {

namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void relax() {
#ifdef OBOLE_X86
    __builtin_ia32_pause();
#endif
}

uint32_t epoch_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

}  // namespace

Pool::Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    {
        std::lock_guard lock(sleep_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

bool Pool::take_one(uint32_t epoch) {
    uint64_t ticket = ticket_.load();
    do {
        if (epoch_of(ticket) != epoch || static_cast<uint32_t>(ticket) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1));
    function_(context_, chunks_ - static_cast<uint32_t>(ticket));
    unfinished_.fetch_sub(1);
    return true;
}

void Pool::run(int64_t n, Function function, void* context) {
    std::unique_lock lock(busy_, std::defer_lock);
    if (n <= 1 || n > UINT32_MAX || workers_.empty() || !lock.try_lock()) {
        for (int64_t i = 0; i < n; ++i) function(context, i);
        return;
    }
    function_ = function;
    context_ = context;
    chunks_ = n;
    unfinished_ = n;
    const uint32_t epoch = epoch_of(ticket_.load()) + 1;
    ticket_ = static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(n);
    if (sleeping_ > 0) {
        std::lock_guard guard(sleep_);  // a worker that is about to sleep has seen the ticket or hears the call
        wake_.notify_all();
    }
    while (take_one(epoch)) {
    }
    for (int spins = 0; unfinished_ > 0; ++spins) {
        if (spins < 4096) relax();
        else std::this_thread::yield();  // the thread that holds the last chunk may need this processor
    }
}

void Pool::work() {
    uint32_t done = 0;
    while (true) {
        const auto fresh = [&] { return stop_ || epoch_of(ticket_) != done; };
        const auto deadline = std::chrono::steady_clock::now() + kSpin;
        while (!fresh()) {
            for (int i = 0; i < 16; ++i) relax();
            if (std::chrono::steady_clock::now() < deadline) continue;
            std::unique_lock lock(sleep_);
            ++sleeping_;
            wake_.wait(lock, fresh);
            --sleeping_;
        }
        if (stop_) return;
        done = epoch_of(ticket_);
        while (take_one(done)) {
        }
    }
}

}  // namespace obole

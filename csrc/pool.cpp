#include "pool.h"

#include <chrono>

namespace obole {

namespace {

constexpr auto kSpin = std::chrono::microseconds(200);  // longer than what lies between two steps

void relax() {
#ifdef OBOLE_X86
    __builtin_ia32_pause();
#endif
}

uint32_t epoch_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

}  // namespace

Pool::Pool(int threads) : shares_(static_cast<size_t>(threads)) {
    try {
        for (size_t i = 1; i < shares_.size(); ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {  // the system has no more threads: those that run must end before they are forgotten
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    {
        std::lock_guard lock(sleep_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::take_part(size_t own, uint32_t epoch) {
    int64_t done = 0;
    for (size_t i = 0; i < shares_.size(); ++i) {
        Share& share = shares_[(own + i) % shares_.size()];
        uint64_t ticket = share.ticket.load();
        while (epoch_of(ticket) == epoch && static_cast<uint32_t>(ticket) > 0) {
            if (!share.ticket.compare_exchange_weak(ticket, ticket - 1)) continue;
            function_(context_, share.first + share.count - static_cast<uint32_t>(ticket));
            ++done;
            ticket = share.ticket.load();
        }
    }
    if (done) unfinished_.fetch_sub(done);
}

void Pool::run(int64_t n, Function function, void* context) {
    std::unique_lock lock(busy_, std::defer_lock);
    if (n <= 1 || n > UINT32_MAX || workers_.empty() || !lock.try_lock()) {
        for (int64_t i = 0; i < n; ++i) function(context, i);
        return;
    }
    function_ = function;
    context_ = context;
    unfinished_ = n;
    const auto threads = static_cast<int64_t>(shares_.size());
    for (int64_t i = 0; i < threads; ++i) {
        shares_[i].first = n * i / threads;
        shares_[i].count = n * (i + 1) / threads - shares_[i].first;
    }
    const uint32_t epoch = epoch_of(shares_[0].ticket.load()) + 1;
    for (Share& share : shares_) share.ticket = static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(share.count);
    if (sleeping_ > 0) {
        std::lock_guard guard(sleep_);  // a worker that is about to sleep has seen the ticket or hears the call
        wake_.notify_all();
    }
    take_part(0, epoch);
    for (int spins = 0; unfinished_ > 0; ++spins) {
        if (spins < 4096) relax();
        else std::this_thread::yield();  // the thread that holds the last chunk may need this processor
    }
}

void Pool::work(size_t own) {
    uint32_t done = 0;
    while (true) {
        const auto fresh = [&] { return stop_ || epoch_of(shares_[own].ticket) != done; };
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
        done = epoch_of(shares_[own].ticket);
        take_part(own, done);
    }
}

}  // namespace obole

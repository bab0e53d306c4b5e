// A step recorded once and run again in one call: its operations in order, with all their addresses.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace obole {

// Whoever records sees to it that everything the operations point to lives as long as the tape.
class Tape {
public:
    template <class Operation>
    void add(const char* name, Operation operation) {
        steps_.emplace_back(name, std::move(operation));
    }

    int64_t size() const { return static_cast<int64_t>(steps_.size()); }

    void run() const {
        for (const auto& [name, operation] : steps_) operation();
    }

    // The same, with the nanoseconds that went into the operations of each name.
    std::map<std::string, int64_t> run_timed() const {
        std::vector<std::pair<const char*, int64_t>> spent;  // few names: a look-up here must cost next to nothing
        auto last = std::chrono::steady_clock::now();
        for (const auto& [name, operation] : steps_) {
            operation();
            const auto now = std::chrono::steady_clock::now();
            auto entry = spent.begin();
            while (entry != spent.end() && entry->first != name) ++entry;
            if (entry == spent.end()) entry = spent.insert(entry, {name, 0});
            entry->second += std::chrono::nanoseconds(now - last).count();
            last = now;
        }
        std::map<std::string, int64_t> sums;
        for (const auto& [name, nanoseconds] : spent) sums[name] += nanoseconds;
        return sums;
    }

private:
    std::vector<std::pair<const char*, std::function<void()>>> steps_;
};

}  // namespace obole

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
        std::map<std::string, int64_t> spent;
        for (const auto& [name, operation] : steps_) {
            const auto start = std::chrono::steady_clock::now();
            operation();
            spent[name] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
        }
        return spent;
    }

private:
    std::vector<std::pair<const char*, std::function<void()>>> steps_;
};

}  // namespace obole

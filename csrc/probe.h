// What this machine can do at most: loops that only read, or only multiply and add, to hold the kernels against.
#pragma once

#include <cstdint>
#include <string>

#include "pool.h"

namespace obole {

class Probe {
public:
    explicit Probe(int threads) : pool_(threads) {}

    int threads() const { return pool_.threads(); }

    // Read `bytes` (a multiple of 64) at `data`, aligned to 64, once, shared among the threads. Returns the exclusive or
    // of its 64-bit words, so that no read can be left out.
    uint64_t read(const uint8_t* data, int64_t bytes);

    // Multiply and add on registers, `rounds` times on each thread, and return the products made in all; 0 where this
    // machine has no such instruction. `isa`: "amx", "avx512vnni", "avx2" or "portable"; bf16 also wants AVX512-BF16.
    // `kind`: "int8" (8-bit products, 32-bit sums), "fp32" or "bf16" (32-bit sums).
    int64_t multiply(const std::string& kind, const std::string& isa, int64_t rounds);

private:
    Pool pool_;
};

}  // namespace obole

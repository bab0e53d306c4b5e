// Tile registers in plain C++, after the operations that Intel's Software Developer's Manual gives for LDTILECFG,
// TILEZERO, TILELOADD, TILESTORED and TDPBSSD: for tests on processors without AMX. What a processor answers with a fault
// ends the program here too.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tiles.h"

namespace obole {
namespace {

class EmulatedTiles {
public:
    explicit EmulatedTiles(const TileConfig& config) : config_(config) {
        require(config.palette == 1 && config.start_row == 0);
        for (const uint8_t byte : config.reserved) require(byte == 0);
        for (const uint8_t byte : config.more_reserved) require(byte == 0);
        for (const uint8_t byte : config.yet_more_reserved) require(byte == 0);
        for (int t = 0; t < kTileRegisters; ++t) {
            require(config.rows[t] <= kTileRows && config.row_bytes[t] <= kTileBytes);
            require((config.rows[t] == 0) == (config.row_bytes[t] == 0));
        }
    }
    EmulatedTiles(const EmulatedTiles&) = delete;
    EmulatedTiles& operator=(const EmulatedTiles&) = delete;

    template <int t>
    void zero() {
        require(config_.rows[t] > 0);
        std::memset(data_[t], 0, sizeof data_[t]);
    }
    template <int t>
    void load(const void* p, int64_t stride) {
        zero<t>();
        for (int row = 0; row < config_.rows[t]; ++row)
            std::memcpy(data_[t][row], static_cast<const uint8_t*>(p) + row * stride, config_.row_bytes[t]);
    }
    template <int t>
    void store(void* p, int64_t stride) const {
        require(config_.rows[t] > 0);
        for (int row = 0; row < config_.rows[t]; ++row)
            std::memcpy(static_cast<uint8_t*>(p) + row * stride, data_[t][row], config_.row_bytes[t]);
    }
    template <int c, int a, int b>
    void multiply() {
        static_assert(c != a && a != b && c != b);
        const auto& rows = config_.rows;
        const auto& bytes = config_.row_bytes;
        require(rows[c] > 0 && rows[a] > 0 && rows[b] > 0);
        require(rows[c] == rows[a] && bytes[c] == bytes[b] && bytes[a] == 4 * rows[b]);
        require(bytes[c] % 4 == 0);
        for (int m = 0; m < rows[c]; ++m) {
            int32_t sums[kTileBytes / 4];
            std::memcpy(sums, data_[c][m], sizeof sums);
            for (int k = 0; k < bytes[a] / 4; ++k)
                for (int n = 0; n < bytes[c] / 4; ++n)
                    for (int i = 0; i < 4; ++i) sums[n] += signed_byte(a, m, 4 * k + i) * signed_byte(b, k, 4 * n + i);
            std::memcpy(data_[c][m], sums, sizeof sums);
        }
    }

private:
    static void require(bool condition) {
        if (!condition) std::abort();
    }
    int32_t signed_byte(int t, int row, int i) const { return static_cast<int8_t>(data_[t][row][i]); }

    TileConfig config_;
    uint8_t data_[kTileRegisters][kTileRows][kTileBytes] = {};
};

}  // namespace
}  // namespace obole

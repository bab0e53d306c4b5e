// What kernel_tiles.h asks of tile registers: those of AMX (tiles_amx.h), or the same in plain C++ (tiles_emulated.h).
//
// There are eight registers, each of up to 16 rows of up to 64 bytes. A `Tiles` object holds the registers of its thread
// for as long as it lives:
//
//   Tiles(config)       gives the registers their shapes and zeros
//   zero<t>()           register t = 0
//   load<t>(p, stride)  its rows from memory, `stride` bytes apart
//   store<t>(p, stride) and to memory
//   multiply<c, a, b>() c[m][n] += sum over k, i of a[m][4 k + i] * b[k][4 n + i]; a and b: int8; c: int32
//   ~Tiles()            gives the registers back, so that the system need not keep them and the core may rest
#pragma once

#include <cstddef>
#include <cstdint>

namespace obole {

constexpr int kTileRegisters = 8, kTileRows = 16, kTileBytes = 64;

// The operand of LDTILECFG: shapes of the registers.
struct alignas(64) TileConfig {
    uint8_t palette = 1;  // of 8 registers of 1 KB; the only one there is
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[kTileRegisters] = {};
    uint8_t more_reserved[16] = {};
    uint8_t rows[kTileRegisters] = {};
    uint8_t yet_more_reserved[8] = {};
};
static_assert(sizeof(TileConfig) == 64 && offsetof(TileConfig, row_bytes) == 16 && offsetof(TileConfig, rows) == 48);

}  // namespace obole

// The tile registers of AMX (AMX-TILE and AMX-INT8). What each function does is told in tiles.h.
//
// In assembler, because GCC's intrinsics take their register only as a literal digit, and because those of GCC 12 tell the
// compiler neither that a load reads memory nor that LDTILECFG reads all 64 bytes: it might leave out what was stored there.
// The compiler itself uses no tile register.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace obole {
namespace {

class AmxTiles {
public:
    explicit AmxTiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
    ~AmxTiles() { asm volatile("tilerelease"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    template <int t>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(t));
    }
    template <int t>
    void load(const void* p, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    void store(void* p, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int c, int a, int b>
    void multiply() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    }
};

}  // namespace
}  // namespace obole

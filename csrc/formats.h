// The packed weight formats: one tiled layout for every kind of weight a file may hold.
//
// A matrix is cut into blocks of 16 output columns. A block is one sequential stream over the inputs, in tiles of
// 16 columns x 32 inputs; a 32-bit lane holds 4 consecutive inputs ("a quad") of one column, so that one 64-byte register
// is one quad of all 16 columns, the operand of an 8-bit dot-product instruction.
//
//   tile  = scales | plane | codes
//   codes   4, 5, 6 bits: 4 registers; low nibbles are quads 0..3, high nibbles quads 4..7.    8 bits: 8 registers.
//   plane   5 bits: 1 register, bit q of a byte belongs to quad q.    6 bits: 2 registers, the first for quads 0..3,
//           two bits each, lowest first.
//   scales  one group of 32: 16 halves d, then, with a minimum, 16 halves m.
//           K kinds: per tile 16 bytes of scales and 16 bytes of minima, or two times 16 signed scales (6 bits, for the
//           groups of 16); every 8 tiles are preceded by 16 halves d and, with a minimum, 16 halves dmin.
//
// Unquantised kinds lie as [input][16 columns] in their own width.
#pragma once

#include <cstdint>

namespace obole {

constexpr int kColumns = 16;  // output columns of a block, lanes of a register
constexpr int kGroup = 32;    // inputs that share one activation scale

enum class Kind : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct Format {
    int bits;         // of a code
    int zero_shift;   // the code that means 0 is 1 << zero_shift; -1: there is none
    bool has_min;     // weight = scale * code + minimum
    bool is_k;        // 8 tiles share d (and dmin)
    bool halves;      // scales are per 16 inputs

    constexpr int tiles() const { return is_k ? 8 : 1; }
    constexpr int header_bytes() const { return is_k ? (has_min ? 64 : 32) : 0; }
    constexpr int scale_bytes() const { return is_k || !has_min ? 32 : 64; }
    constexpr int plane_bytes() const { return bits == 5 ? 64 : bits == 6 ? 128 : 0; }
    constexpr int code_bytes() const { return bits == 8 ? 512 : 256; }
    constexpr int tile_bytes() const { return scale_bytes() + plane_bytes() + code_bytes(); }
    constexpr int64_t stream_bytes(int64_t inputs) const {
        return inputs / kGroup * tile_bytes() + inputs / (kGroup * tiles()) * header_bytes();
    }
};

constexpr Format kQ4_0{4, 3, false, false, false};
constexpr Format kQ4_1{4, -1, true, false, false};
constexpr Format kQ5_0{5, 4, false, false, false};
constexpr Format kQ5_1{5, -1, true, false, false};
constexpr Format kQ8_0{8, 7, false, false, false};
constexpr Format kQ4_K{4, -1, true, true, false};
constexpr Format kQ5_K{5, -1, true, true, false};
constexpr Format kQ6_K{6, 5, false, true, true};

constexpr bool is_float(Kind kind) { return kind == Kind::F32 || kind == Kind::F16 || kind == Kind::BF16; }

constexpr Format format_of(Kind kind) {
    switch (kind) {
        case Kind::Q4_0: return kQ4_0;
        case Kind::Q4_1: return kQ4_1;
        case Kind::Q5_0: return kQ5_0;
        case Kind::Q5_1: return kQ5_1;
        case Kind::Q8_0: return kQ8_0;
        case Kind::Q4_K: return kQ4_K;
        case Kind::Q5_K: return kQ5_K;
        case Kind::Q6_K: return kQ6_K;
        default: return Format{};
    }
}

constexpr int64_t stream_bytes(Kind kind, int64_t inputs) {
    if (kind == Kind::F32) return inputs * kColumns * 4;
    if (is_float(kind)) return inputs * kColumns * 2;
    return format_of(kind).stream_bytes(inputs);
}

}  // namespace obole

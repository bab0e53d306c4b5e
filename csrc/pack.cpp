#include "pack.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace obole {

namespace {

// 32 weights of one column, as they lie in a file: codes, and the raw scales that belong to them.
struct Codes {
    uint8_t code[kGroup];
    uint16_t d, m;    // halves; of the block of 256 for K kinds
    uint8_t s, s2;    // K kinds: scale and minimum, or the two scales of Q6_K
};

struct FileBlock {
    int64_t weights, bytes;
};

FileBlock file_block(Kind kind) {
    switch (kind) {
        case Kind::F32: return {1, 4};
        case Kind::F16:
        case Kind::BF16: return {1, 2};
        case Kind::Q4_0: return {32, 18};
        case Kind::Q4_1: return {32, 20};
        case Kind::Q5_0: return {32, 22};
        case Kind::Q5_1: return {32, 24};
        case Kind::Q8_0: return {32, 34};
        case Kind::Q4_K: return {256, 144};
        case Kind::Q5_K: return {256, 176};
        case Kind::Q6_K: return {256, 210};
    }
    throw std::invalid_argument("unknown kind of weights");
}

uint16_t half_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// Q4_0, Q4_1, Q5_0, Q5_1: d [m] [one high bit for each] nibbles; low ones first.
void read_block32(const uint8_t* p, bool has_min, bool fifth_bit, Codes& out) {
    out.d = half_at(p), p += 2;
    if (has_min) out.m = half_at(p), p += 2;
    uint32_t high = 0;
    if (fifth_bit) std::memcpy(&high, p, 4), p += 4;
    for (int i = 0; i < 16; ++i) {
        out.code[i] = static_cast<uint8_t>((p[i] & 15) | (high >> i & 1) << 4);
        out.code[i + 16] = static_cast<uint8_t>((p[i] >> 4) | (high >> (i + 16) & 1) << 4);
    }
}

// Q4_K, Q5_K: d, dmin, 12 bytes of 6-bit scales and minima, [32 bytes of high bits], nibbles of two groups a byte.
void read_k45(const uint8_t* p, int g, bool fifth_bit, Codes& out) {
    out.d = half_at(p), out.m = half_at(p + 2);
    const uint8_t* s = p + 4;
    out.s = g < 4 ? s[g] & 63 : static_cast<uint8_t>((s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
    out.s2 = g < 4 ? s[g + 4] & 63 : static_cast<uint8_t>((s[g + 4] >> 4) | (s[g] >> 6) << 4);
    const uint8_t* high = p + 16;
    const uint8_t* low = (fifth_bit ? high + 32 : high) + 32 * (g / 2);
    for (int i = 0; i < kGroup; ++i) {
        const int bit = fifth_bit ? high[i] >> g & 1 : 0;
        out.code[i] = static_cast<uint8_t>((low[i] >> 4 * (g % 2) & 15) | bit << 4);
    }
}

// Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d.
void read_k6(const uint8_t* p, int g, Codes& out) {
    const uint8_t* low = p + 64 * (g / 4) + 32 * (g % 2);
    const uint8_t* high = p + 128 + 32 * (g / 4);
    for (int i = 0; i < kGroup; ++i)
        out.code[i] = static_cast<uint8_t>((low[i] >> 4 * (g / 2 % 2) & 15) | (high[i] >> 2 * (g % 4) & 3) << 4);
    out.s = p[192 + 2 * g], out.s2 = p[193 + 2 * g];
    out.d = half_at(p + 208);
}

// Group g (of 32) of a row of the file.
void read_group(Kind kind, const uint8_t* row, int64_t g, Codes& out) {
    const Format f = format_of(kind);
    const uint8_t* p = row + g / f.tiles() * file_block(kind).bytes;
    if (kind == Kind::Q6_K) return read_k6(p, static_cast<int>(g % 8), out);
    if (f.is_k) return read_k45(p, static_cast<int>(g % 8), f.bits == 5, out);
    if (kind != Kind::Q8_0) return read_block32(p, f.has_min, f.bits == 5, out);
    out.d = half_at(p);
    for (int i = 0; i < kGroup; ++i) out.code[i] = p[2 + i] ^ 0x80;
}

void put_half(uint8_t* p, int column, uint16_t h) { std::memcpy(p + 2 * column, &h, 2); }

// Where tile g of a stream begins (its scales).
int64_t tile_offset(const Format& f, int64_t g) {
    return g * f.tile_bytes() + (g / f.tiles() + 1) * f.header_bytes();
}

// `tile` is zero before its first column is written.
void write_group(const Format& f, const Codes& c, int column, bool with_header, uint8_t* tile) {
    if (with_header) {
        put_half(tile - f.header_bytes(), column, c.d);
        if (f.has_min) put_half(tile - f.header_bytes() + 32, column, c.m);
    }
    if (f.is_k) {
        tile[column] = c.s, tile[16 + column] = c.s2;
    } else {
        put_half(tile, column, c.d);
        if (f.has_min) put_half(tile + 32, column, c.m);
    }
    uint8_t* plane = tile + f.scale_bytes();
    uint8_t* codes = plane + f.plane_bytes();
    for (int i = 0; i < kGroup; ++i) {
        const int quad = i / 4, lane = 4 * column + i % 4;
        if (f.bits == 8) {
            codes[64 * quad + lane] = c.code[i];
            continue;
        }
        codes[64 * (quad % 4) + lane] |= static_cast<uint8_t>((c.code[i] & 15) << 4 * (quad / 4));
        if (f.bits == 5) plane[lane] |= static_cast<uint8_t>(c.code[i] >> 4 << quad);
        if (f.bits == 6) plane[64 * (quad / 4) + lane] |= static_cast<uint8_t>(c.code[i] >> 4 << 2 * (quad % 4));
    }
}

int code_at(const Format& f, const uint8_t* tile, int column, int i) {
    const int quad = i / 4, lane = 4 * column + i % 4;
    const uint8_t* plane = tile + f.scale_bytes();
    const uint8_t* codes = plane + f.plane_bytes();
    if (f.bits == 8) return codes[64 * quad + lane];
    const int low = codes[64 * (quad % 4) + lane] >> 4 * (quad / 4) & 15;
    if (f.bits == 5) return low | (plane[lane] >> quad & 1) << 4;
    if (f.bits == 6) return low | (plane[64 * (quad / 4) + lane] >> 2 * (quad % 4) & 3) << 4;
    return low;
}

float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float from_half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t rest = h & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return from_bits(sign | ((rest << 13) + 0x38000000));
    const float tiny = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -tiny : tiny;
}

float half_of(const uint8_t* p, int column) { return from_half(half_at(p + 2 * column)); }

// The order of operations of the file format's definition, so that the values are exactly those it defines.
void dequantize_group(const Format& f, const uint8_t* tile, const uint8_t* header, int column, float scale, float* out) {
    float d = half_of(f.is_k ? header : tile, column), d2 = 0, m = 0;
    if (f.has_min) m = half_of((f.is_k ? header : tile) + 32, column);
    if (f.halves) {
        d2 = d * static_cast<float>(static_cast<int8_t>(tile[16 + column]));
        d = d * static_cast<float>(static_cast<int8_t>(tile[column]));
    } else if (f.is_k) {
        d = d * static_cast<float>(tile[column]);
        m = m * static_cast<float>(tile[16 + column]);
    }
    const int zero = f.zero_shift < 0 ? 0 : 1 << f.zero_shift;
    for (int i = 0; i < kGroup; ++i) {
        float w = (f.halves && i >= 16 ? d2 : d) * static_cast<float>(code_at(f, tile, column, i) - zero);
        if (f.has_min) w = f.is_k ? w - m : w + m;
        out[i] = w * scale;
    }
}

void pack_block(const Part& part, int64_t block, const uint8_t* rows, int64_t row_bytes, uint8_t* stream) {
    const int64_t first = block * kColumns;
    for (int c = 0; c < kColumns && first + c < part.outputs; ++c) {
        const uint8_t* row = rows + (first + c) * row_bytes;
        if (is_float(part.kind)) {
            const int64_t size = file_block(part.kind).bytes;
            for (int64_t k = 0; k < part.inputs; ++k)
                std::memcpy(stream + (k * kColumns + c) * size, row + k * size, static_cast<size_t>(size));
            continue;
        }
        const Format f = format_of(part.kind);
        Codes codes{};
        for (int64_t g = 0; g < part.inputs / kGroup; ++g) {
            read_group(part.kind, row, g, codes);
            write_group(f, codes, c, f.is_k && g % 8 == 0, stream + tile_offset(f, g));
        }
    }
}

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

Buffer allocate(int64_t bytes) {
    const int64_t align = bytes >= 2 * kHugePage ? kHugePage : 64;
    const int64_t size = (bytes + align - 1) / align * align;
    void* p = std::aligned_alloc(static_cast<size_t>(align), static_cast<size_t>(size ? size : align));
    if (!p) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (align == kHugePage) madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);  // fewer page-table walks per pass
#endif
    std::memset(p, 0, static_cast<size_t>(size));
    return Buffer(static_cast<uint8_t*>(p), [](uint8_t* q) { std::free(q); });
}

int64_t file_bytes(Kind kind, int64_t inputs) {
    const FileBlock b = file_block(kind);
    return inputs % b.weights ? -1 : inputs / b.weights * b.bytes;
}

void Packed::add(Kind kind, int64_t outputs, const float* bias) {
    if (outputs < 0 || file_bytes(kind, inputs_) < 0)
        throw std::invalid_argument("rows of " + std::to_string(inputs_) + " weights do not fill whole blocks of this kind");
    Part part{kind, inputs_, outputs, outputs_, (outputs + kColumns - 1) / kColumns, stream_bytes(kind, inputs_), nullptr,
              nullptr};
    const int64_t bytes = part.blocks * part.block_bytes;
    Buffer data = allocate(bytes);
    filled_ = data.get();
    part.data = filled_;
    memory_.push_back(std::move(data));
    if (bias) {
        Buffer copy = allocate(part.blocks * kColumns * 4);
        std::memcpy(copy.get(), bias, static_cast<size_t>(outputs) * 4);
        part.bias = reinterpret_cast<const float*>(copy.get());
        memory_.push_back(std::move(copy));
    }
    parts_.push_back(part);
    outputs_ += outputs;
    bytes_ += bytes;
}

void Packed::fill(Pool& pool, const uint8_t* rows, int64_t row_bytes, int64_t first, int64_t count) {
    if (parts_.empty() || row_bytes != file_bytes(parts_.back().kind, inputs_))
        throw std::invalid_argument("a row of " + std::to_string(inputs_) + " weights does not take " +
                                    std::to_string(row_bytes) + " bytes in this kind");
    const Part& part = parts_.back();
    const int64_t end = first + count;
    if (first < 0 || count < 0 || end > part.outputs || first % kColumns || (end % kColumns && end < part.outputs))
        throw std::invalid_argument("rows are filled in by whole blocks of 16");
    const int64_t begin = first / kColumns;
    pool.run((end + kColumns - 1) / kColumns - begin, [&, out = filled_](int64_t i) {
        const int64_t b = begin + i;
        pack_block(part, b, rows - first * row_bytes, row_bytes, out + b * part.block_bytes);
    });
}

void Packed::dequantize(int64_t id, float scale, float* out) const {
    const Part* part = parts_.data();
    while (id >= part->column + part->outputs) ++part;
    const int64_t in_part = id - part->column;
    const uint8_t* stream = part->data + in_part / kColumns * part->block_bytes;
    const int column = static_cast<int>(in_part % kColumns);
    if (!is_float(part->kind)) {
        const Format f = format_of(part->kind);
        for (int64_t g = 0; g < inputs_ / kGroup; ++g) {
            const uint8_t* header = stream + tile_offset(f, g / f.tiles() * f.tiles()) - f.header_bytes();
            dequantize_group(f, stream + tile_offset(f, g), header, column, scale, out + g * kGroup);
        }
        return;
    }
    const int64_t size = file_block(part->kind).bytes;
    for (int64_t k = 0; k < inputs_; ++k) {
        const uint8_t* p = stream + (k * kColumns + column) * size;
        float w;
        if (part->kind == Kind::F32) std::memcpy(&w, p, 4);
        else w = part->kind == Kind::F16 ? from_half(half_at(p)) : from_bits(static_cast<uint32_t>(half_at(p)) << 16);
        out[k] = w * scale;
    }
}

}  // namespace obole

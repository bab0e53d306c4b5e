// How one key or value is put into the pool. One source for all instruction sets: the same bits for all.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "isa.h"

namespace obole {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

constexpr uint32_t kInfinity = 0x7f800000;

struct Bf16 {
    uint16_t bits;

    Bf16(float x) {
        const uint32_t b = bits_of(x);
        const bool nan = (b & 0x7fffffff) > kInfinity;
        bits = static_cast<uint16_t>(nan ? b >> 16 | 0x40 : (b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
};

// Codes of 8 bits, rounded to the nearest (ties to even), for values up to `largest` and a rounding error more.
struct Int8 {
    static constexpr float largest = 127.0f;

    static uint8_t code(float x) {
        return static_cast<uint8_t>(bits_of(x + 12582912.0f));  // 1.5 * 2^23: adding it leaves no bits for the fraction
    }
};

struct E4m3 {
    static constexpr float largest = 448.0f;

    static uint8_t code(float x) {
        const uint32_t sign = bits_of(x) >> 24 & 0x80, size = bits_of(x) & 0x7fffffff;
        const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
        const uint32_t tiny = bits_of(of_bits(size) * 512.0f + 12582912.0f) & 15;  // below 2^-6: multiples of 2^-9
        return static_cast<uint8_t>(sign | std::min<uint32_t>(size < 0x3c800000 ? tiny : normal, 0x7e));
    }
};

// Each number by itself.
template <class T>
struct Rounded {
    T *k, *v;

    explicit Rounded(const KvPool& pool) : k(static_cast<T*>(pool.k)), v(static_cast<T*>(pool.v)) {}

    void key(const float* x, int64_t n, int64_t at, int64_t) const {
        for (int64_t d = 0; d < n; ++d) k[at + d * kBlock] = T(x[d]);
    }
    void value(const float* x, int64_t n, int64_t at, int64_t) const {
        for (int64_t d = 0; d < n; ++d) v[at + d] = T(x[d]);
    }
};

// Codes and their scale: the largest magnitude becomes the largest code. A vector too small for its scale to be a normal
// number is stored as zeros; one with a NaN or an infinity gets the scale NaN, so that whoever sees it cannot miss it.
template <class Code>
struct Scaled {
    uint8_t *k, *v;
    float *scale_k, *scale_v;

    explicit Scaled(const KvPool& pool)
        : k(static_cast<uint8_t*>(pool.k)), v(static_cast<uint8_t*>(pool.v)), scale_k(pool.scale_k), scale_v(pool.scale_v) {}

    void key(const float* x, int64_t n, int64_t at, int64_t scale_at) const {
        scale_k[scale_at] = encode<kBlock>(x, n, k + at);
    }
    void value(const float* x, int64_t n, int64_t at, int64_t scale_at) const { scale_v[scale_at] = encode<1>(x, n, v + at); }

private:
    template <int64_t stride>
    static float encode(const float* x, int64_t n, uint8_t* to) {
        int32_t top = 0;  // as integers, so that NaN and infinity come out on top whatever the order of comparison
        for (int64_t d = 0; d < n; ++d) top = std::max(top, static_cast<int32_t>(bits_of(x[d]) & 0x7fffffff));
        const bool finite = static_cast<uint32_t>(top) < kInfinity;
        const float scale = of_bits(static_cast<uint32_t>(top)) / Code::largest;
        if (!finite || scale < std::numeric_limits<float>::min()) {
            for (int64_t d = 0; d < n; ++d) to[d * stride] = 0;
            return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        }
        for (int64_t d = 0; d < n; ++d) to[d * stride] = Code::code(x[d] / scale);
        return scale;
    }
};

}  // namespace obole

// 16 lanes in plain C++ with the vector extensions of GCC and Clang: runs on any processor, and defines what the others do.
//
// Every type of simd_*.h offers the same functions, which give the same bits. F: 16 floats; I: 16 int32, or 64 bytes.
//   loadn, storen           only the first n lanes; the others are 0, or left alone
//   e4m3                    256 times too small: 16 codes (8 bits) of that format, as if their exponents were those of halves
//   fma, fnma               a*b + c, c - a*b, rounded once
//   max, min                a > b ? a : b, so that a NaN in b comes through and one in a does not
//   hsum, hmax              lanes i and i+8 first, then i+4, i+2, i+1
//   keep                    lanes [from, to), others replaced
//   scale2(y, t)            y * 2^n for t = n + 1.5 * 2^23, n from -126 to 127
//   round                   to the nearest integer, ties to even; |x| < 2^22
//   less                    64 bytes, each less the same number
//   dot                     per lane: acc + sum of 4 unsigned codes times the same 4 signed bytes
#pragma once

#include <cstdint>
#include <cstring>

namespace obole {
namespace {

struct Portable {
    typedef float F __attribute__((vector_size(64), aligned(64)));
    typedef int32_t I __attribute__((vector_size(64), aligned(64)));
    static constexpr int rows = 4;  // of a pass over quantised weights, at most
    static constexpr int sums = 4;  // that registers have room for, beside what goes into them
    static constexpr int64_t few_rows_ahead = 0;  // bytes that products of one to three rows call in early
    static constexpr bool paired = false;
    static constexpr const char* name = "portable";

    static F zero() { return F{}; }
    static F set1(float x) { return F{} + x; }
    static F load(const float* p) {
        F x;
        std::memcpy(&x, p, 64);
        return x;
    }
    static F loadn(const float* p, int64_t n) {
        F x{};
        std::memcpy(&x, p, 4 * n);
        return x;
    }
    static void store(float* p, F x) { std::memcpy(p, &x, 64); }
    static void storen(float* p, F x, int64_t n) { std::memcpy(p, &x, 4 * n); }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F fma(F a, F b, F c) {
        for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return c;
    }
    static F fnma(F a, F b, F c) { return fma(-a, b, c); }
    static F max(F a, F b) { return a > b ? a : b; }
    static F min(F a, F b) { return a < b ? a : b; }
    static F if_less(F x, F y, F a, F b) { return x < y ? a : b; }
    static unsigned equal(F a, F b) {
        unsigned mask = 0;
        for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(a[i] == b[i]) << i;
        return mask;
    }
    static F keep(F x, int64_t from, int64_t to, float other) {
        for (int64_t i = 0; i < 16; ++i) x[i] = from <= i && i < to ? x[i] : other;
        return x;
    }
    static float hsum(F x) {
        for (int n = 8; n > 0; n /= 2)
            for (int i = 0; i < n; ++i) x[i] = x[i] + x[i + n];
        return x[0];
    }
    static float hmax(F x) {
        for (int n = 8; n > 0; n /= 2)
            for (int i = 0; i < n; ++i) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
        return x[0];
    }
    static F scale2(F y, F t) {
        typedef uint32_t U __attribute__((vector_size(64), aligned(64)));
        return y * reinterpret_cast<F>((reinterpret_cast<U>(t) << 23) + 0x3f800000u);
    }
    static F half(const void* p) {
        uint16_t h[16];
        std::memcpy(h, p, sizeof h);
        F x;
        for (int i = 0; i < 16; ++i) x[i] = half1(h[i]);
        return x;
    }
    static F bf16(const void* p) {
        uint16_t b[16];
        std::memcpy(b, p, sizeof b);
        F x;
        for (int i = 0; i < 16; ++i) x[i] = from_bits(static_cast<uint32_t>(b[i]) << 16);
        return x;
    }
    static F u8(const void* p) {
        F x;
        for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(static_cast<const uint8_t*>(p)[i]);
        return x;
    }
    static F i8(const void* p) {
        F x;
        for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(static_cast<const int8_t*>(p)[i]);
        return x;
    }
    static F e4m3(const void* p) {
        F x;
        for (int i = 0; i < 16; ++i) {
            const uint32_t code = static_cast<const uint8_t*>(p)[i];
            x[i] = half1(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7));
        }
        return x;
    }

    static I izero() { return I{}; }
    static I iset1(int32_t x) { return I{} + x; }
    static I iload(const void* p) {
        I x;
        std::memcpy(&x, p, 64);
        return x;
    }
    static void istore(void* p, I x) { std::memcpy(p, &x, 64); }
    static I iadd(I a, I b) { return a + b; }
    static I imax(I a, I b) { return a > b ? a : b; }
    static int32_t ihsum(I x) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) sum += x[i];
        return sum;
    }
    static int32_t ihmax(I x) {
        int32_t top = x[0];
        for (int i = 1; i < 16; ++i) top = x[i] > top ? x[i] : top;
        return top;
    }
    template <int n>
    static I shl(I x) {
        return reinterpret_cast<I>(unsigned_lanes(x) << n);
    }
    template <int n>
    static I shr(I x) {
        return reinterpret_cast<I>(unsigned_lanes(x) >> n);
    }
    static I masked(I x, uint8_t bits) { return x & static_cast<int32_t>(bits * 0x01010101u); }
    static I bit_or(I a, I b) { return a | b; }
    static I less(I codes, int zero) {
        typedef uint8_t Bytes __attribute__((vector_size(64), aligned(64)));
        return reinterpret_cast<I>(reinterpret_cast<Bytes>(codes) - static_cast<uint8_t>(zero));
    }
    static F cvt(I x) { return __builtin_convertvector(x, F); }
    static I round(F x) {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for the fraction
        return __builtin_convertvector((x + magic) - magic, I);
    }
    static I abs_bits(F x) { return reinterpret_cast<I>(x) & 0x7fffffff; }
    static void store_i8(int8_t* p, I x) {
        for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x[i]);
    }
    static I dot(I acc, I codes, const int8_t* quad) {
        for (int i = 0; i < 4; ++i) acc += (shr_by(codes, 8 * i) & 0xff) * static_cast<int32_t>(quad[i]);
        return acc;
    }
    static void prefetch(const void*) {}

private:
    typedef uint32_t U __attribute__((vector_size(64), aligned(64)));
    static U unsigned_lanes(I x) { return reinterpret_cast<U>(x); }
    static I shr_by(I x, int n) { return reinterpret_cast<I>(unsigned_lanes(x) >> n); }
    static float from_bits(uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    static float half1(uint16_t h) {
        const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
        const uint32_t rest = h & 0x7fff;
        if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
        const float magnitude = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24f : from_bits((rest << 13) + 0x38000000);
        return sign ? -magnitude : magnitude;
    }
};

}  // namespace
}  // namespace obole

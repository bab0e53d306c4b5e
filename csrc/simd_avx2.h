// 16 lanes in two registers: AVX2 with FMA and F16C. The vocabulary is explained in simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace obole {
namespace {

struct Avx2 {
    struct F {
        __m256 lo, hi;
    };
    struct I {
        __m256i lo, hi;
    };
    static constexpr int rows = 16;  // of a pass over quantised weights, at most
    static constexpr int sums = 4;  // that registers have room for, beside what goes into them
    static constexpr int64_t few_rows_ahead = 4096;  // without, unpacking a tile and reading the next hardly overlap (Zen 3)
    static constexpr bool paired = true;
    static constexpr const char* name = "avx2";

    static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F loadn(const float* p, int64_t n) {
        return {_mm256_maskload_ps(p, below(n)), _mm256_maskload_ps(p + 8, below(n - 8))};
    }
    static void store(float* p, F x) {
        _mm256_storeu_ps(p, x.lo);
        _mm256_storeu_ps(p + 8, x.hi);
    }
    static void storen(float* p, F x, int64_t n) {
        _mm256_maskstore_ps(p, below(n), x.lo);
        _mm256_maskstore_ps(p + 8, below(n - 8), x.hi);
    }
    static F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
    static F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
    static F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
    static F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
    static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
    static F fnma(F a, F b, F c) { return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)}; }
    static F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
    static F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
    static F if_less(F x, F y, F a, F b) {
        return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
                _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
    }
    static unsigned equal(F a, F b) {
        const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ));
        const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
        return static_cast<unsigned>(lo) | static_cast<unsigned>(hi) << 8;
    }
    static F keep(F x, int64_t from, int64_t to, float other) {
        const __m256 y = _mm256_set1_ps(other);
        return {_mm256_blendv_ps(y, x.lo, _mm256_castsi256_ps(between(from, to))),
                _mm256_blendv_ps(y, x.hi, _mm256_castsi256_ps(between(from - 8, to - 8)))};
    }
    static float hsum(F x) {
        const __m256 y = _mm256_add_ps(x.lo, x.hi);
        __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        z = _mm_add_ps(z, _mm_movehl_ps(z, z));
        return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
    }
    static float hmax(F x) {
        const __m256 y = _mm256_max_ps(x.lo, x.hi);
        __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        z = _mm_max_ps(z, _mm_movehl_ps(z, z));
        return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
    }
    static F scale2(F y, F t) {
        return {_mm256_mul_ps(y.lo, power(t.lo)), _mm256_mul_ps(y.hi, power(t.hi))};
    }
    static F half(const void* p) {
        const __m128i* h = static_cast<const __m128i*>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
    }
    static F bf16(const void* p) {
        const __m128i* h = static_cast<const __m128i*>(p);
        return {widen(_mm_loadu_si128(h)), widen(_mm_loadu_si128(h + 1))};
    }
    static F u8(const void* p) {
        const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
        return cvt({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x))});
    }
    static F i8(const void* p) {
        const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
        return cvt({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))});
    }
    static F e4m3(const void* p) {
        const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
        const __m256i h = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
    }

    static I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    static I iload(const void* p) {
        const __m256i* x = static_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(x), _mm256_loadu_si256(x + 1)};
    }
    static void istore(void* p, I x) {
        _mm256_storeu_si256(static_cast<__m256i*>(p), x.lo);
        _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.hi);
    }
    static I iadd(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
    static I imax(I a, I b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
    static int32_t ihsum(I x) {
        const __m256i y = _mm256_add_epi32(x.lo, x.hi);
        __m128i z = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
        z = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
    }
    static int32_t ihmax(I x) {
        const __m256i y = _mm256_max_epi32(x.lo, x.hi);
        __m128i z = _mm_max_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
        z = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
    }
    template <int n>
    static I shl(I x) {
        return {_mm256_slli_epi32(x.lo, n), _mm256_slli_epi32(x.hi, n)};
    }
    template <int n>
    static I shr(I x) {
        return {_mm256_srli_epi32(x.lo, n), _mm256_srli_epi32(x.hi, n)};
    }
    static I masked(I x, uint8_t bits) {
        const __m256i mask = _mm256_set1_epi8(static_cast<char>(bits));
        return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
    }
    static I bit_or(I a, I b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
    static I less(I codes, int zero) {
        const __m256i z = _mm256_set1_epi8(static_cast<char>(zero));
        return {_mm256_sub_epi8(codes.lo, z), _mm256_sub_epi8(codes.hi, z)};
    }
    static F cvt(I x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
    static I round(F x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
    static I abs_bits(F x) {
        const __m256i mask = _mm256_set1_epi32(0x7fffffff);
        return {_mm256_and_si256(_mm256_castps_si256(x.lo), mask), _mm256_and_si256(_mm256_castps_si256(x.hi), mask)};
    }
    static void store_i8(int8_t* p, I x) {
        __m256i y = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
        y = _mm256_packs_epi16(y, y);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm_unpacklo_epi64(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
    }
    static I pairs(I codes, const int8_t* quad) {
        const __m256i a = four(quad);
        return {_mm256_maddubs_epi16(codes.lo, a), _mm256_maddubs_epi16(codes.hi, a)};
    }
    static I abs8(I x) { return {_mm256_abs_epi8(x.lo), _mm256_abs_epi8(x.hi)}; }
    static I signed_pairs(I codes, I magnitudes, const int8_t* quad) {
        const __m256i a = four(quad);
        return {_mm256_maddubs_epi16(magnitudes.lo, _mm256_sign_epi8(a, codes.lo)),
                _mm256_maddubs_epi16(magnitudes.hi, _mm256_sign_epi8(a, codes.hi))};
    }
    // The compiler must not compute all that is to be added first: there are too few registers to keep it in.
    static I iadd16(I a, I b) {
        a = {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
        asm volatile("" : "+x"(a.lo), "+x"(a.hi));
        return a;
    }
    static I widened(I pairs) {
        const __m256i ones = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(pairs.lo, ones), _mm256_madd_epi16(pairs.hi, ones)};
    }
    static I add_pairs(I sum, I pairs) {
        sum = iadd(sum, widened(pairs));
        asm volatile("" : "+x"(sum.lo), "+x"(sum.hi));
        return sum;
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

private:
    static __m256i below(int64_t n) { return between(0, n); }
    static __m256i between(int64_t from, int64_t to) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(from)), lane),
                                   _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(to)), lane));
    }
    static __m256 power(__m256 t) {
        const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)));
    }
    static __m256 widen(__m128i x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    }
    static __m256i four(const int8_t* quad) {
        int32_t x;
        std::memcpy(&x, quad, 4);
        return _mm256_set1_epi32(x);
    }
};

}  // namespace
}  // namespace obole

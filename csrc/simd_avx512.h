// 16 lanes in one register: AVX-512 (F, BW, DQ, VL) with VNNI. The vocabulary is explained in simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace obole {
namespace {

struct Avx512 {
    using F = __m512;
    using I = __m512i;
    static constexpr int rows = 16;  // of a pass over quantised weights, at most
    static constexpr int sums = 16;  // that registers have room for, beside what goes into them
    static constexpr int64_t few_rows_ahead = 0;  // the machine's own prefetching suffices
    static constexpr bool paired = false;
    static constexpr const char* name = "avx512vnni";

    static __mmask16 lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F loadn(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static void storen(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F if_less(F x, F y, F a, F b) { return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a); }
    static unsigned equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
    static F keep(F x, int64_t from, int64_t to, float other) {
        const __mmask16 mask = static_cast<__mmask16>((1u << to) - (1u << from));
        return _mm512_mask_mov_ps(set1(other), mask, x);
    }
    static float hsum(F x) {
        __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        z = _mm_add_ps(z, _mm_movehl_ps(z, z));
        return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
    }
    static float hmax(F x) {
        __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
        z = _mm_max_ps(z, _mm_movehl_ps(z, z));
        return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
    }
    static F scale2(F y, F t) {
        const I n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
        return mul(y, _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000))));
    }
    static F half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
    static F bf16(const void* p) { return widen(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
    static F u8(const void* p) {
        return cvt(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
    }
    static F i8(const void* p) {
        return cvt(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
    }
    static F e4m3(const void* p) {
        const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
        return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(static_cast<short>(0xbfff))));
    }

    static I izero() { return _mm512_setzero_si512(); }
    static I iset1(int32_t x) { return _mm512_set1_epi32(x); }
    static I iload(const void* p) { return _mm512_loadu_si512(p); }
    static void istore(void* p, I x) { _mm512_storeu_si512(p, x); }
    static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
    static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
    static int32_t ihsum(I x) { return _mm512_reduce_add_epi32(x); }
    static int32_t ihmax(I x) { return _mm512_reduce_max_epi32(x); }
    template <int n>
    static I shl(I x) {
        return _mm512_slli_epi32(x, n);
    }
    template <int n>
    static I shr(I x) {
        return _mm512_srli_epi32(x, n);
    }
    static I masked(I x, uint8_t bits) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(bits))); }
    static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
    static I less(I codes, int zero) { return _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(zero))); }
    static F cvt(I x) { return _mm512_cvtepi32_ps(x); }
    static I round(F x) { return _mm512_cvtps_epi32(x); }
    static I abs_bits(F x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }
    static void store_i8(int8_t* p, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
    }
    static I dot(I acc, I codes, const int8_t* quad) {
        int32_t x;
        std::memcpy(&x, quad, 4);
        return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(x));
    }
    static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

private:
    static F widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
};

}  // namespace
}  // namespace obole

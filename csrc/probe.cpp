#include "probe.h"

#include <algorithm>
#include <cstring>

#ifdef OBOLE_X86
#include <immintrin.h>

#include "amx.h"
#include "tiles_amx.h"
#endif

namespace obole {

namespace {

constexpr int64_t kChunk = 512 << 10;  // bytes a thread reads at a time

uint64_t read_portable(const uint8_t* data, int64_t bytes) {
    uint64_t sums[8] = {};
    for (int64_t i = 0; i < bytes; i += 64) {
        uint64_t words[8];
        std::memcpy(words, data + i, 64);
        for (int j = 0; j < 8; ++j) sums[j] ^= words[j];
    }
    for (int j = 1; j < 8; ++j) sums[0] ^= sums[j];
    return sums[0];
}

// Dots of 1,024 elements that stay in the first-level cache, however the compiler vectorises them.
template <class Element, class Sum>
int64_t dots_portable(int64_t rounds) {
    constexpr int64_t n = 1024, dots = 64;  // in a round
    alignas(64) Element a[n], b[n];
    for (int64_t i = 0; i < n; ++i) a[i] = static_cast<Element>(i % 5), b[i] = static_cast<Element>(i % 3);
    for (int64_t r = 0; r < rounds * dots; ++r) {
        asm volatile("" ::"r"(a), "r"(b) : "memory");
        Sum sums[16] = {};
        for (int64_t i = 0; i < n; i += 16)
            for (int64_t j = 0; j < 16; ++j) sums[j] += static_cast<Sum>(a[i + j]) * static_cast<Sum>(b[i + j]);
        asm volatile("" ::"r"(sums) : "memory");
    }
    return rounds * dots * n;
}

#ifdef OBOLE_X86

constexpr int64_t kSums = 12;     // enough to hide the latency of two such instructions a cycle
constexpr int64_t kInner = 1024;  // instructions for each of them in a round

// Variables rather than an array, which GCC would keep in memory.
#define OBOLE_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
// The compiler must take a sum for used, and for changed, or it would leave out the loop.
#define OBOLE_KEEP(j) asm volatile("" : "+v"(s##j));
#define OBOLE_ZERO(j) auto s##j = zero;
#define OBOLE_REPEAT(step)                               \
    OBOLE_TWELVE(OBOLE_ZERO)                             \
    for (int64_t r = 0; r < rounds * kInner; ++r) {      \
        OBOLE_TWELVE(step)                               \
        OBOLE_TWELVE(OBOLE_KEEP)                         \
    }

__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* data, int64_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int64_t i = 0; i < bytes; i += 64) {
        a = _mm256_xor_si256(a, _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i)));
        b = _mm256_xor_si256(b, _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32)));
    }
    alignas(32) uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), _mm256_xor_si256(a, b));
    return words[0] ^ words[1] ^ words[2] ^ words[3];
}

__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* data, int64_t bytes) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < bytes; i += 64) sum = _mm512_xor_si512(sum, _mm512_load_si512(data + i));
    alignas(64) uint64_t words[8];
    _mm512_store_si512(words, sum);
    uint64_t all = 0;
    for (const uint64_t word : words) all ^= word;
    return all;
}

__attribute__((target("avx512f,avx512vnni"))) int64_t int8_avx512vnni(int64_t rounds) {
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
    const auto zero = _mm512_setzero_si512();
#define OBOLE_STEP(j) s##j = _mm512_dpbusd_epi32(s##j, a, b);
    OBOLE_REPEAT(OBOLE_STEP)
#undef OBOLE_STEP
    return rounds * kInner * kSums * 64;
}

__attribute__((target("avx512f"))) int64_t fp32_avx512(int64_t rounds) {
    const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
    const auto zero = _mm512_setzero_ps();
#define OBOLE_STEP(j) s##j = _mm512_fmadd_ps(a, b, s##j);
    OBOLE_REPEAT(OBOLE_STEP)
#undef OBOLE_STEP
    return rounds * kInner * kSums * 16;
}

__attribute__((target("avx512f,avx512bf16"))) int64_t bf16_avx512(int64_t rounds) {
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
    const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.25f), _mm512_set1_ps(0.25f));
    const auto zero = _mm512_setzero_ps();
#define OBOLE_STEP(j) s##j = _mm512_dpbf16_ps(s##j, a, b);
    OBOLE_REPEAT(OBOLE_STEP)
#undef OBOLE_STEP
    return rounds * kInner * kSums * 32;
}

// Whole tiles: 16 rows by 64 inputs by 16 columns an instruction.
int64_t int8_amx(int64_t rounds) {
    TileConfig config;
    for (int t = 0; t < kTileRegisters; ++t) config.rows[t] = kTileRows, config.row_bytes[t] = kTileBytes;
    AmxTiles tiles(config);
    for (int64_t r = 0; r < rounds * kInner; ++r) {
        tiles.multiply<0, 4, 6>();
        tiles.multiply<1, 4, 7>();
        tiles.multiply<2, 5, 6>();
        tiles.multiply<3, 5, 7>();
    }
    return rounds * kInner * 4 * kTileRows * kTileBytes * kTileRows;
}

// Without a dot-product instruction: 8 to 16 bits in pairs, 16 to 32 bits in pairs, a sum.
__attribute__((target("avx2"))) int64_t int8_avx2(int64_t rounds) {
    const __m256i b = _mm256_set1_epi8(-5), one = _mm256_set1_epi16(1);
    __m256i a = _mm256_set1_epi8(3);
    const auto zero = _mm256_setzero_si256();
#define OBOLE_STEP(j)                                                                  \
    s##j = _mm256_add_epi32(s##j, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one)); \
    asm volatile("" : "+v"(a));  // else the same product would be made once for all
    OBOLE_REPEAT(OBOLE_STEP)
#undef OBOLE_STEP
    return rounds * kInner * kSums * 32;
}

__attribute__((target("avx2,fma"))) int64_t fp32_avx2(int64_t rounds) {
    const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
    const auto zero = _mm256_setzero_ps();
#define OBOLE_STEP(j) s##j = _mm256_fmadd_ps(a, b, s##j);
    OBOLE_REPEAT(OBOLE_STEP)
#undef OBOLE_STEP
    return rounds * kInner * kSums * 8;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

#endif

using Read = uint64_t (*)(const uint8_t*, int64_t);
using Multiply = int64_t (*)(int64_t);

Read reader() {
#ifdef OBOLE_X86
    if (has_avx512()) return read_avx512;
    if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
    return read_portable;
}

Multiply multiplier(const std::string& kind, const std::string& isa) {
#ifdef OBOLE_X86
    const bool amx = isa == "amx" && !amx_refusal();
    if (amx && kind == "int8") return int8_amx;
    if (isa == "avx512vnni" || amx) {
        if (kind == "int8" && has_vnni()) return int8_avx512vnni;
        if (kind == "fp32" && has_avx512()) return fp32_avx512;
        if (kind == "bf16" && has_bf16()) return bf16_avx512;
    }
    if (isa == "avx2" && has_avx2()) {
        if (kind == "int8") return int8_avx2;
        if (kind == "fp32") return fp32_avx2;
    }
#endif
    if (isa == "portable" && kind == "int8") return dots_portable<int8_t, int32_t>;
    if (isa == "portable" && kind == "fp32") return dots_portable<float, float>;
    return nullptr;
}

}  // namespace

uint64_t Probe::read(const uint8_t* data, int64_t bytes) {
    const Read function = reader();
    std::atomic<uint64_t> all{0};
    pool_.run((bytes + kChunk - 1) / kChunk, [&](int64_t i) {
        all.fetch_xor(function(data + i * kChunk, std::min(kChunk, bytes - i * kChunk)), std::memory_order_relaxed);
    });
    return all;
}

int64_t Probe::multiply(const std::string& kind, const std::string& isa, int64_t rounds) {
    const Multiply function = multiplier(kind, isa);
    if (!function) return 0;
    std::atomic<int64_t> products{0};
    // one round a chunk, so that a thread that is slower or late does less rather than keeping the others waiting
    pool_.run(rounds * threads(), [&](int64_t) { products.fetch_add(function(1), std::memory_order_relaxed); });
    return products;
}

}  // namespace obole

// Operations on one row at a time.
#pragma once

#include <cstdint>

#include "kernel_math.h"

namespace obole {
namespace {

// Mean square over 4 x 16 running sums, whatever n is.
template <class V>
void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    auto s0 = V::zero(), s1 = V::zero(), s2 = V::zero(), s3 = V::zero();
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const auto a = V::load(x + i), b = V::load(x + i + 16), c = V::load(x + i + 32), d = V::load(x + i + 48);
        s0 = V::fma(a, a, s0);
        s1 = V::fma(b, b, s1);
        s2 = V::fma(c, c, s2);
        s3 = V::fma(d, d, s3);
    }
    for (; i < n; i += 16) {
        const auto a = n - i < 16 ? V::loadn(x + i, n - i) : V::load(x + i);
        s0 = V::fma(a, a, s0);
    }
    const float sum = V::hsum(V::add(V::add(s0, s1), V::add(s2, s3)));
    const auto inverse = V::set1(1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps));
    for (i = 0; i + 16 <= n; i += 16)
        V::store(out + i, V::mul(V::mul(V::load(x + i), inverse), V::load(weight + i)));
    if (i < n) V::storen(out + i, V::mul(V::mul(V::loadn(x + i, n - i), inverse), V::loadn(weight + i, n - i)), n - i);
}

template <class V>
void add(float* x, const float* y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) V::store(x + i, V::add(V::load(x + i), V::load(y + i)));
    for (; i < n; ++i) x[i] = x[i] + y[i];
}

template <class V>
inline typename V::F silu(typename V::F x) {
    return V::div(x, V::add(V::set1(1.0f), exp<V>(V::sub(V::zero(), x))));
}

// x/2 (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): no cancellation for negative x.
template <class V>
inline typename V::F gelu_tanh(typename V::F x) {
    const auto cubic = V::fma(V::mul(V::mul(x, x), x), V::set1(0.044715f), x);
    return V::div(x, V::add(V::set1(1.0f), exp<V>(V::mul(V::set1(-1.5957691216f), cubic))));
}

template <class V, bool is_silu>
void gated(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t m = n - i < 16 ? n - i : 16;
        const auto g = V::loadn(gate + i, m);
        const auto a = is_silu ? silu<V>(g) : gelu_tanh<V>(g);
        V::storen(out + i, V::mul(a, V::loadn(up + i, m)), m);
    }
}

template <class V>
void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
    gated<V, true>(gate, up, n, out);
}

template <class V>
void gelu_tanh_mul(const float* gate, const float* up, int64_t n, float* out) {
    gated<V, false>(gate, up, n, out);
}

template <class V>
void rope(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t m = half - i < 16 ? half - i : 16;
        const auto a = V::loadn(x + i, m), b = V::loadn(x + half + i, m);
        const auto c = V::loadn(cos + i, m), s = V::loadn(sin + i, m);
        V::storen(x + i, V::sub(V::mul(a, c), V::mul(b, s)), m);
        V::storen(x + half + i, V::add(V::mul(b, c), V::mul(a, s)), m);
    }
}

// First index of the largest value; 0 if all are NaN.
template <class V>
int64_t argmax(const float* x, int64_t n) {
    const float least = -__builtin_inff();
    auto best = V::set1(least);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) best = V::max(V::load(x + i), best);
    if (i < n) best = V::max(V::keep(V::loadn(x + i, n - i), 0, n - i, least), best);
    const float top = V::hmax(best);
    for (i = 0; i + 16 <= n; i += 16)
        if (const unsigned found = V::equal(V::load(x + i), V::set1(top))) return i + __builtin_ctz(found);
    for (; i < n; ++i)
        if (x[i] == top) return i;
    return 0;
}

// Sum of exp(x - top) over 4 x 16 running sums; NaN counts as minus infinity.
template <class V>
float exp_sum(const float* x, int64_t n, float top) {
    const auto shift = V::set1(top), least = V::set1(-__builtin_inff());
    const auto term = [&](typename V::F v) { return exp<V>(V::sub(V::max(v, least), shift)); };
    auto s0 = V::zero(), s1 = V::zero(), s2 = V::zero(), s3 = V::zero();
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        s0 = V::add(s0, term(V::load(x + i)));
        s1 = V::add(s1, term(V::load(x + i + 16)));
        s2 = V::add(s2, term(V::load(x + i + 32)));
        s3 = V::add(s3, term(V::load(x + i + 48)));
    }
    for (; i + 16 <= n; i += 16) s0 = V::add(s0, term(V::load(x + i)));
    if (i < n) s0 = V::add(s0, V::keep(term(V::loadn(x + i, n - i)), 0, n - i, 0.0f));
    return V::hsum(V::add(V::add(s0, s1), V::add(s2, s3)));
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), key = seed,
// counter = (low 32 bits of id / 4, position, 0), one of the four words for each id.
inline __attribute__((always_inline)) void philox(uint64_t seed, uint64_t position, uint32_t counter, uint32_t (&word)[4]) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c0 = counter, c1 = static_cast<uint32_t>(position), c2 = static_cast<uint32_t>(position >> 32), c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(b);
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

inline __attribute__((always_inline)) float gumbel_of(uint32_t word) {
    const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
    return static_cast<float>(-log_normal(-log_normal(u)));
}

inline void gumbel(uint64_t seed, uint64_t position, const int64_t* ids, int64_t first, int64_t n, float* out) {
    constexpr int64_t batch = 256;
    uint32_t words[batch];
    for (int64_t i = 0; i < n; i += batch) {
        const int64_t m = n - i < batch ? n - i : batch;
        uint32_t four[4];
        int64_t held = -1;  // the counter whose words are in `four`
        for (int64_t j = 0; j < m; ++j) {
            const int64_t id = ids ? ids[i + j] : first + i + j;
            if (id / 4 != held) philox(seed, position, static_cast<uint32_t>(held = id / 4), four);
            words[j] = four[id % 4];
        }
        for (int64_t j = 0; j < m; ++j) out[i + j] = gumbel_of(words[j]);
    }
}

}  // namespace
}  // namespace obole

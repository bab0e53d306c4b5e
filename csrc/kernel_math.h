// exp and log in a fixed sequence of basic operations, so that every instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace obole {
namespace {

// Within 2 units in the last place from -87.33 to 88.37; 0 below, the value at 88.37 above; NaN for NaN.
// Cody-Waite reduction, then the minimax polynomial of Cephes' expf.
template <class V>
inline __attribute__((always_inline)) typename V::F exp(typename V::F x) {
    const auto low = V::set1(-87.33f);
    const auto y = V::min(V::set1(88.37f), V::max(low, x));
    const auto magic = V::set1(12582912.0f);  // 1.5 * 2^23: rounds to an integer
    const auto t = V::fma(y, V::set1(1.44269504f), magic);
    const auto n = V::sub(t, magic);
    auto r = V::fnma(n, V::set1(0.693359375f), y);
    r = V::fnma(n, V::set1(-2.12194440e-4f), r);
    auto p = V::set1(1.9875691500e-4f);
    p = V::fma(p, r, V::set1(1.3981999507e-3f));
    p = V::fma(p, r, V::set1(8.3334519073e-3f));
    p = V::fma(p, r, V::set1(4.1665795894e-2f));
    p = V::fma(p, r, V::set1(1.6666665459e-1f));
    p = V::fma(p, r, V::set1(5.0000001201e-1f));
    p = V::fma(p, V::mul(r, r), r);
    return V::if_less(x, low, V::zero(), V::scale2(V::add(p, V::set1(1.0f)), t));
}

// Natural logarithm of a positive normal number (fdlibm's e_log.c, without its branches): under 1 unit in the last place.
inline __attribute__((always_inline)) double log_normal(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, 8);
    const int32_t high = static_cast<int32_t>(bits >> 32);
    const int32_t k = (high - 0x3fe6a09e) >> 20;  // x = 2^k z, z from sqrt(1/2) to sqrt(2)
    const int64_t z_bits = bits - (static_cast<int64_t>(k) << 52);
    double z;
    std::memcpy(&z, &z_bits, 8);
    const double f = z - 1.0, s = f / (2.0 + f), s2 = s * s, s4 = s2 * s2, half = 0.5 * f * f, n = k;
    const double even = s4 * (3.999999999940941908e-01 + s4 * (2.222219843214978396e-01 + s4 * 1.531383769920937332e-01));
    const double odd = s2 * (6.666666666666735130e-01 +
                             s4 * (2.857142874366239149e-01 +
                                   s4 * (1.818357216161805012e-01 + s4 * 1.479819860511658591e-01)));
    return n * 6.93147180369123816490e-01 -
           ((half - (s * (half + (even + odd)) + n * 1.90821492927058770002e-10)) - f);
}

}  // namespace
}  // namespace obole

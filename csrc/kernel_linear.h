// Products of packed weights with rows of activations: the same arithmetic on every instruction set and for any number of
// rows. For each row and column, over groups g of 32 inputs in order (halves of 16 for Q6_K, one after the other):
//
//   acc = fma(float(sum(code * a) - zero * sum(a)), scale_w * scale_a, acc)      integer sums are exact
//   acc = fma(float(sum(a)) * scale_a, min_w, acc)                               where there is a minimum
//
// and for unquantised weights acc = fma(w[k], x[k], acc) over k in order. A bias is added last.
#pragma once

#include <cstdint>

#include "isa.h"

namespace obole {
namespace {

// Inputs smaller than this in all of a group count as 0: their reciprocal could overflow.
constexpr float kTiny = 0x1p-100f;

template <class V>
void quantize(const float* x, int64_t inputs, Group* out) {
    for (int64_t g = 0; g < inputs / kGroup; ++g, x += kGroup, ++out) {
        const auto a = V::load(x), b = V::load(x + 16);
        // As integers, so that NaN and infinity come out on top whatever the order of comparison.
        const int32_t top = V::ihmax(V::imax(V::abs_bits(a), V::abs_bits(b)));
        float amax;
        __builtin_memcpy(&amax, &top, 4);
        if (top >= 0x7f800000 || amax < kTiny) {
            *out = Group{};
            if (top >= 0x7f800000) out->scale = __builtin_nanf("");
            continue;
        }
        const auto inverse = V::set1(127.0f / amax);
        const auto ca = V::round(V::mul(a, inverse)), cb = V::round(V::mul(b, inverse));
        V::store_i8(out->code, ca);
        V::store_i8(out->code + 16, cb);
        out->scale = amax / 127.0f;
        out->nhalf[0] = -V::ihsum(ca);
        out->nhalf[1] = -V::ihsum(cb);
        out->nsum = out->nhalf[0] + out->nhalf[1];
        out->nweight = static_cast<float>(out->nsum) * out->scale;
    }
}

// The 8 quads of a tile as unsigned bytes; `p` points behind the scales.
template <class V, Format Q>
inline __attribute__((always_inline)) void unpack(const uint8_t* p, typename V::I (&code)[8]) {
    if constexpr (Q.bits == 8) {
#pragma GCC unroll 8
        for (int q = 0; q < 8; ++q) code[q] = V::iload(p + 64 * q);
        return;
    }
    const uint8_t* nibbles = p + Q.plane_bytes();
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
        const auto both = V::iload(nibbles + 64 * q);
        code[q] = V::masked(both, 0x0f);
        code[q + 4] = V::masked(V::template shr<4>(both), 0x0f);
    }
    if constexpr (Q.bits == 5) {
        const auto h = V::iload(p);
        code[0] = V::bit_or(code[0], V::masked(V::template shl<4>(h), 0x10));
        code[1] = V::bit_or(code[1], V::masked(V::template shl<3>(h), 0x10));
        code[2] = V::bit_or(code[2], V::masked(V::template shl<2>(h), 0x10));
        code[3] = V::bit_or(code[3], V::masked(V::template shl<1>(h), 0x10));
        code[4] = V::bit_or(code[4], V::masked(h, 0x10));
        code[5] = V::bit_or(code[5], V::masked(V::template shr<1>(h), 0x10));
        code[6] = V::bit_or(code[6], V::masked(V::template shr<2>(h), 0x10));
        code[7] = V::bit_or(code[7], V::masked(V::template shr<3>(h), 0x10));
    }
    if constexpr (Q.bits == 6) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const auto h = V::iload(p + 64 * half);
            code[4 * half] = V::bit_or(code[4 * half], V::masked(V::template shl<4>(h), 0x30));
            code[4 * half + 1] = V::bit_or(code[4 * half + 1], V::masked(V::template shl<2>(h), 0x30));
            code[4 * half + 2] = V::bit_or(code[4 * half + 2], V::masked(h, 0x30));
            code[4 * half + 3] = V::bit_or(code[4 * half + 3], V::masked(V::template shr<2>(h), 0x30));
        }
    }
}

// Scales of a tile in float: s[1] only for kinds with scales per 16 inputs.
template <class V, Format Q>
struct Scales {
    typename V::F s[2], m;
};

template <class V, Format Q>
inline __attribute__((always_inline)) Scales<V, Q> scales(const uint8_t* p, typename V::F d, typename V::F dmin) {
    Scales<V, Q> out;
    if constexpr (!Q.is_k) {
        out.s[0] = V::half(p);
        if constexpr (Q.has_min) out.m = V::half(p + 32);
    } else if constexpr (Q.halves) {
        out.s[0] = V::mul(d, V::i8(p));
        out.s[1] = V::mul(d, V::i8(p + 16));
    } else {
        out.s[0] = V::mul(d, V::u8(p));
        out.m = V::mul(dmin, V::u8(p + 16));
    }
    return out;
}

template <class V, Format Q>
inline __attribute__((always_inline)) typename V::I start(int32_t nsum) {
    if constexpr (Q.zero_shift < 0) return V::izero();
    return V::template shl<Q.zero_shift < 0 ? 0 : Q.zero_shift>(V::iset1(nsum));
}

constexpr int parts_of(Format q) { return q.halves ? 2 : 1; }

// Sums of code * a of a tile for one row, less the zero point's share, in one part or two.
template <class V, Format Q>
inline __attribute__((always_inline)) void row_sums(const typename V::I (&code)[8], const Group& a,
                                                    typename V::I (&sum)[parts_of(Q)]) {
    constexpr int quads = 8 / parts_of(Q);
    for (int part = 0; part < parts_of(Q); ++part) {
        sum[part] = start<V, Q>(Q.halves ? a.nhalf[part] : a.nsum);
#pragma GCC unroll 8
        for (int q = quads * part; q < quads * (part + 1); ++q) sum[part] = V::dot(sum[part], code[q], a.code + 4 * q);
    }
}

// The same for R rows where there is no instruction for a whole dot product, but one that adds two products to 16 bits. The sums
// of several quads fit into these, so that they are widened but once.
template <class V, Format Q, int R>
inline __attribute__((always_inline)) void paired_sums(const typename V::I (&code)[8], const Group* a, int64_t stride,
                                                       typename V::I (&sum)[R][parts_of(Q)]) {
    constexpr int quads = 8 / parts_of(Q), together = Q.bits == 4 ? 8 : Q.bits == 5 ? 4 : Q.bits == 6 ? 2 : 1;
    static_assert(Q.bits == 8 || together * 2 * ((1 << Q.bits) - 1) * 127 <= 32767);
#pragma GCC unroll 8
    for (int first = 0; first < 8; first += together) {
        typename V::I pair[R];
#pragma GCC unroll 8
        for (int q = first; q < first + together; ++q) {
            if constexpr (Q.bits == 8) {  // less the zero point at once: then two products fit
                static_assert(Q.zero_shift == 7);
                const auto signed_code = V::less(code[q], 1 << Q.zero_shift);
                const auto magnitude = V::abs8(signed_code);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) pair[r] = V::signed_pairs(signed_code, magnitude, a[r * stride].code + 4 * q);
            } else {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const auto p = V::pairs(code[q], a[r * stride].code + 4 * q);
                    pair[r] = q == first ? p : V::iadd16(pair[r], p);
                }
            }
        }
        const int part = first / quads;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][part] = first % quads ? V::add_pairs(sum[r][part], pair[r]) : V::widened(pair[r]);
    }
    if constexpr (Q.bits < 8 && Q.zero_shift >= 0) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            for (int part = 0; part < parts_of(Q); ++part)
                sum[r][part] = V::iadd(sum[r][part], start<V, Q>(Q.halves ? a[r * stride].nhalf[part] : a[r * stride].nsum));
    }
}

// The sums of a tile, weighed, on top of those of the tiles before it.
template <class V, Format Q>
inline __attribute__((always_inline)) typename V::F weigh(typename V::F acc, const typename V::I (&sum)[parts_of(Q)],
                                                          const Scales<V, Q>& w, const Group& a) {
    const auto scale = V::set1(a.scale);
    for (int part = 0; part < parts_of(Q); ++part) acc = V::fma(V::cvt(sum[part]), V::mul(w.s[part], scale), acc);
    if constexpr (Q.has_min) {
        // K kinds subtract their minimum; `nweight` is minus the sum of the inputs. Both signs are exact.
        const auto n = V::set1(a.nweight);
        acc = Q.is_k ? V::fma(n, w.m, acc) : V::fnma(n, w.m, acc);
    }
    return acc;
}

// R rows of one column block. With `ahead`, what lies that many bytes further on is called into the cache meanwhile: several
// rows take longer to compute than to read, and the machine's own prefetching pauses between blocks. For fewer than four rows
// the instruction set says how far to reach.
template <class V, Format Q, int R>
inline void product_rows(const uint8_t* w, int64_t groups, const Group* acts, int64_t ahead, typename V::F (&acc)[R]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = V::zero();
    for (int64_t g = 0; g < groups; g += Q.tiles()) {
        auto d = V::zero(), dmin = V::zero();
        if constexpr (Q.is_k) {
            d = V::half(w);
            if constexpr (Q.has_min) dmin = V::half(w + 32);
            w += Q.header_bytes();
        }
        for (int64_t t = g; t < g + Q.tiles(); ++t) {
            typename V::I code[8];
            unpack<V, Q>(w + Q.scale_bytes(), code);
            const auto s = scales<V, Q>(w, d, dmin);
            const int64_t next = R >= 4 ? ahead : V::few_rows_ahead;
            if (next)
                for (int b = 0; b < Q.tile_bytes(); b += 64) V::prefetch(w + next + b);
            w += Q.tile_bytes();
            if constexpr (V::paired) {
                // Sums of four rows fit the registers; the codes wait in the first-level cache for the next four.
                constexpr int some = R < 4 ? R : 4;
                const auto add = [&](int first) {
                    typename V::I sum[some][parts_of(Q)];
                    const Group* a = acts + first * groups + t;
                    paired_sums<V, Q, some>(code, a, groups, sum);
#pragma GCC unroll 4
                    for (int r = 0; r < some; ++r) acc[first + r] = weigh<V, Q>(acc[first + r], sum[r], s, a[r * groups]);
                };
                if constexpr (R == some) add(0);
                else
#pragma GCC unroll 1
                    for (int first = 0; first < R; first += some) add(first);
            } else {
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    typename V::I sum[parts_of(Q)];
                    row_sums<V, Q>(code, acts[r * groups + t], sum);
                    acc[r] = weigh<V, Q>(acc[r], sum, s, acts[r * groups + t]);
                }
            }
        }
    }
}

template <class V, Kind K>
inline __attribute__((always_inline)) typename V::F weight16(const uint8_t* p) {
    if constexpr (K == Kind::F32) return V::load(reinterpret_cast<const float*>(p));
    if constexpr (K == Kind::F16) return V::half(p);
    if constexpr (K == Kind::BF16) return V::bf16(p);
}

// R rows of C column blocks, whose sums do not wait for each other: with one of each, every fma would wait for the last.
template <class V, Kind K, int R, int C>
inline void product_rows_float(const uint8_t* w, int64_t block_bytes, int64_t inputs, const float* x, int64_t x_row,
                               typename V::F (&acc)[R * C]) {
    constexpr int bytes = K == Kind::F32 ? 64 : 32;
#pragma GCC unroll 16
    for (int i = 0; i < R * C; ++i) acc[i] = V::zero();
    for (int64_t k = 0; k < inputs; ++k, w += bytes) {
        typename V::F weight[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) weight[c] = weight16<V, K>(w + c * block_bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto input = V::set1(x[r * x_row + k]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r * C + c] = V::fma(weight[c], input, acc[r * C + c]);
        }
    }
}

struct Operands {
    const Part& part;
    const Group* acts;
    const float* x;
    int64_t x_row;
    float* out;
    int64_t out_row;
};

// One row's sums of a column block, with the bias; `row` is that row of the product.
template <class V>
inline __attribute__((always_inline)) void store_columns(const Part& p, int64_t block, typename V::F sum, float* row) {
    const int64_t column = block * kColumns, n = p.outputs - column;
    float* out = row + p.column + column;
    if (p.bias) sum = V::add(sum, V::load(p.bias + column));
    if (n >= kColumns) V::store(out, sum);
    else V::storen(out, sum, n);
}

// R rows of the C column blocks from `block` on; C is 1 for quantised kinds. Those from `rows` on are not stored.
// `last_rows`: the next block comes after them.
template <class V, Kind K, int R, int C>
void block_rows(const Operands& o, int64_t block, int64_t row, int64_t rows, bool last_rows) {
    const int stored = rows - row < R ? static_cast<int>(rows - row) : R;
    const Part& p = o.part;
    const uint8_t* w = p.data + block * p.block_bytes;
    typename V::F acc[R * C];
    if constexpr (is_float(K)) {
        product_rows_float<V, K, R, C>(w, p.block_bytes, p.inputs, o.x + row * o.x_row, o.x_row, acc);
    } else {
        static_assert(C == 1);
        const int64_t groups = p.inputs / kGroup;
        product_rows<V, format_of(K), R>(w, groups, o.acts + row * groups, last_rows ? p.block_bytes : 0, acc);
    }
    for (int c = 0; c < C; ++c) {
        float* out = o.out + row * o.out_row;
        for (int r = 0; r < stored; ++r, out += o.out_row) store_columns<V>(p, block + c, acc[r * C + c], out);
    }
}

// All rows of C column blocks. A pass over 16, 8 or 4 rows takes hardly longer than one over some rows less, and less than
// two passes: so quantised rows are padded by up to three (`acts` holds that many more), whose sums are not stored.
template <class V, Kind K, int C>
void blocks_all_rows(const Operands& o, int64_t block, int64_t rows) {
    constexpr int most = !is_float(K) ? V::rows : V::sums / C < 8 ? V::sums / C : 8;
    constexpr int64_t pad = is_float(K) ? 0 : V::rows < 8 ? 1 : 3;
    int64_t r = 0;
    if constexpr (most >= 16)
        for (; r + 16 - pad <= rows; r += 16) block_rows<V, K, 16, C>(o, block, r, rows, r + 32 - pad > rows);
    if constexpr (most >= 8)
        for (; r + 8 - pad <= rows; r += 8) block_rows<V, K, 8, C>(o, block, r, rows, r < 8 && rows < 16 - pad);
    if constexpr (most >= 4)
        for (; r + (pad ? 3 : 4) <= rows; r += 4) block_rows<V, K, 4, C>(o, block, r, rows, r < 4 && rows < 8 - pad);
    for (; r + 2 <= rows; r += 2) block_rows<V, K, 2, C>(o, block, r, rows, false);
    for (; r < rows; ++r) block_rows<V, K, 1, C>(o, block, r, rows, false);
}

template <class V, Kind K>
void product_kind(const Operands& o, int64_t first, int64_t last, int64_t rows) {
    int64_t block = first;
    if constexpr (is_float(K) && V::sums >= 8) {  // few rows: as many column blocks side by side as registers allow
        if (rows < 4)
            for (; block + 4 <= last; block += 4) blocks_all_rows<V, K, 4>(o, block, rows);
        else if (rows < 8)
            for (; block + 2 <= last; block += 2) blocks_all_rows<V, K, 2>(o, block, rows);
    }
    for (; block < last; ++block) blocks_all_rows<V, K, 1>(o, block, rows);
}

template <class V>
void product(const Part& part, int64_t first, int64_t last, const Group* acts, const float* x, int64_t x_row, int64_t rows,
             float* out, int64_t out_row) {
    const Operands o{part, acts, x, x_row, out, out_row};
    switch (part.kind) {
        case Kind::F32: return product_kind<V, Kind::F32>(o, first, last, rows);
        case Kind::F16: return product_kind<V, Kind::F16>(o, first, last, rows);
        case Kind::BF16: return product_kind<V, Kind::BF16>(o, first, last, rows);
        case Kind::Q4_0: return product_kind<V, Kind::Q4_0>(o, first, last, rows);
        case Kind::Q4_1: return product_kind<V, Kind::Q4_1>(o, first, last, rows);
        case Kind::Q5_0: return product_kind<V, Kind::Q5_0>(o, first, last, rows);
        case Kind::Q5_1: return product_kind<V, Kind::Q5_1>(o, first, last, rows);
        case Kind::Q8_0: return product_kind<V, Kind::Q8_0>(o, first, last, rows);
        case Kind::Q4_K: return product_kind<V, Kind::Q4_K>(o, first, last, rows);
        case Kind::Q5_K: return product_kind<V, Kind::Q5_K>(o, first, last, rows);
        case Kind::Q6_K: return product_kind<V, Kind::Q6_K>(o, first, last, rows);
    }
}

}  // namespace
}  // namespace obole

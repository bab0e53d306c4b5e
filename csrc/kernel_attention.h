// Attention over a paged cache, one segment of 256 positions at a time, a few queries of one key/value head together.
//
// The arithmetic of a query depends on its own position and context alone:
//   score_j   = scale * sum over d of q[d] k_j[d] (fma, d in order), softcapped, for each visible position j
//   weight_j  = exp(score_j - largest score of the segment)
//   sum       = over 16 lanes (position mod 16), in order of blocks, then across lanes
//   value[d]  = fma(weight_j, v_j[d], value[d]), j in order
// Segments are merged in order by attend_merge. Positions that a query does not see take no part, not even with
// weight 0: their memory may hold anything.
#pragma once

#include <cstdint>

#include "isa.h"
#include "kernel_math.h"

namespace obole {
namespace {

template <class V>
inline typename V::F load_kv(const float* p) {
    return V::load(p);
}
template <class V>
inline typename V::F load_kv(const uint16_t* p) {
    return V::bf16(p);
}
template <class V>
inline typename V::F load_kv(const float* p, int64_t n) {
    return V::loadn(p, n);
}
template <class V>
inline typename V::F load_kv(const uint16_t* p, int64_t n) {
    return V::bf16n(p, n);
}

// N queries and the part of one segment that at least one of them sees.
template <int N>
struct Tile {
    const float* q[N];
    int64_t from[N], to[N];   // positions [from, to) that the query sees in this segment
    int64_t low, high;        // the smallest `from` and the largest `to`
    int64_t both_low, both_high;  // seen by all N
    int64_t base;             // position of score[.][0]: `low` rounded down to a block
    alignas(64) float score[N][kSegment];
};

template <int N>
inline bool place(const Attention& a, const Unit& u, int64_t first, int64_t segment, Tile<N>& t) {
    const int64_t group = a.heads / a.kv_heads, begin = segment * kSegment, end = begin + kSegment;
    t.low = end, t.high = begin, t.both_low = begin, t.both_high = end;
    for (int i = 0; i < N; ++i) {
        const int64_t row = (first + i) / group, head = u.kv_head * group + (first + i) % group;
        const int64_t position = a.pos_starts[u.sequence] + row, oldest = position - a.window + 1;
        t.q[i] = a.q + (a.row_starts[u.sequence] + row) * a.q_row + head * a.q_head;
        t.from[i] = oldest > begin ? oldest : begin;
        t.to[i] = position + 1 < end ? position + 1 : end;
        if (t.from[i] > t.both_low) t.both_low = t.from[i];
        if (t.to[i] < t.both_high) t.both_high = t.to[i];
        if (t.from[i] >= t.to[i]) continue;
        if (t.from[i] < t.low) t.low = t.from[i];
        if (t.to[i] > t.high) t.high = t.to[i];
    }
    t.base = t.low / kBlock * kBlock;
    return t.low < t.high;
}

template <class V>
inline typename V::F capped(const Attention& a, typename V::F s) {
    s = V::mul(s, V::set1(a.scale));
    if (a.softcap == 0.0f) return s;
    // tanh(y) = 1 - 2 / (exp(2y) + 1)
    const auto one = V::set1(1.0f), two = V::set1(2.0f), cap = V::set1(a.softcap);
    const auto e = exp<V>(V::mul(two, V::div(s, cap)));
    return V::mul(cap, V::sub(one, V::div(two, V::add(e, one))));
}

// Scores of B blocks, starting at `position`.
template <class V, class T, int N, int B>
inline void score_blocks(const Attention& a, const Unit& u, int64_t position, Tile<N>& t) {
    const int64_t stride = a.head_dim * kBlock;
    const T* k[B];
    typename V::F acc[N][B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
        const int64_t block = a.table[u.sequence * a.table_row + position / kBlock + b];
        k[b] = static_cast<const T*>(a.pool_k) + (block * a.kv_heads + u.kv_head) * stride;
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) acc[i][b] = V::zero();
    for (int64_t d = 0; d < a.head_dim; ++d) {
        typename V::F key[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) key[b] = load_kv<V>(k[b] + d * kBlock);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            const auto q = V::set1(t.q[i][d]);
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) acc[i][b] = V::fma(q, key[b], acc[i][b]);
        }
    }
    for (int i = 0; i < N; ++i) {
        for (int b = 0; b < B; ++b) {
            const int64_t p = position + b * kBlock;
            const int64_t from = t.from[i] - p < 0 ? 0 : t.from[i] - p > kBlock ? kBlock : t.from[i] - p;
            const int64_t to = t.to[i] - p < from ? from : t.to[i] - p > kBlock ? kBlock : t.to[i] - p;
            V::store(t.score[i] + p - t.base, V::keep(capped<V>(a, acc[i][b]), from, to, -__builtin_inff()));
        }
    }
}

// Scores to weights; the largest score and the sum of weights go to the head of each query's state.
template <class V, int N>
inline void weigh(Tile<N>& t, float* states, int64_t stride) {
    for (int i = 0; i < N; ++i, states += stride) {
        if (t.from[i] >= t.to[i]) continue;
        auto top = V::set1(-__builtin_inff()), sum = V::zero();
        const int64_t n = t.high - t.base;
        for (int64_t j = 0; j < n; j += kBlock) top = V::max(top, V::load(t.score[i] + j));
        const float largest = V::hmax(top);
        const auto shift = V::set1(largest);
        for (int64_t j = 0; j < n; j += kBlock) {
            const auto w = exp<V>(V::sub(V::load(t.score[i] + j), shift));
            sum = V::add(sum, w);
            V::store(t.score[i] + j, w);
        }
        states[0] = largest;
        states[1] = V::hsum(sum);
    }
}

// Weighted values of 16 C dimensions from `d` on; only the first `lanes` of them where C is 1.
template <class V, class T, int N, int C>
inline void weigh_values(const Attention& a, const Unit& u, const Tile<N>& t, int64_t d, int64_t lanes, float* states,
                         int64_t stride) {
    typename V::F acc[N][C];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[i][c] = V::zero();
    for (int64_t p = t.low; p < t.high; ++p) {
        const int64_t block = a.table[u.sequence * a.table_row + p / kBlock];
        const T* v = static_cast<const T*>(a.pool_v) +
                     ((block * a.kv_heads + u.kv_head) * kBlock + p % kBlock) * a.head_dim + d;
        const bool all = t.both_low <= p && p < t.both_high;
        typename V::F value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) value[c] = C == 1 ? load_kv<V>(v, lanes) : load_kv<V>(v + 16 * c);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            if (!all && (p < t.from[i] || p >= t.to[i])) continue;
            const auto w = V::set1(t.score[i][p - t.base]);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) acc[i][c] = V::fma(w, value[c], acc[i][c]);
        }
    }
    for (int i = 0; i < N; ++i) {
        if (t.from[i] >= t.to[i]) continue;
        for (int c = 0; c < C; ++c) V::store(states + i * stride + 16 + d + 16 * c, acc[i][c]);
    }
}

template <class V, class T, int N>
void attend_tile(const Attention& a, const Unit& u, int64_t item, int64_t segment, float* states) {
    Tile<N> t;
    if (!place(a, u, u.first + item, segment, t)) return;
    int64_t p = t.base;
    for (; p + 4 * kBlock <= t.high; p += 4 * kBlock) score_blocks<V, T, N, 4>(a, u, p, t);
    for (; p < t.high; p += kBlock) score_blocks<V, T, N, 1>(a, u, p, t);
    const int64_t stride = state_floats(a.head_dim);
    states += item * stride;
    weigh<V>(t, states, stride);
    int64_t d = 0;
    for (; d + 64 <= a.head_dim; d += 64) weigh_values<V, T, N, 4>(a, u, t, d, 16, states, stride);
    for (; d < a.head_dim; d += 16)
        weigh_values<V, T, N, 1>(a, u, t, d, a.head_dim - d < 16 ? a.head_dim - d : 16, states, stride);
}

template <class V, class T>
void attend_items(const Attention& a, const Unit& u, int64_t segment, float* states) {
    int64_t i = 0;
    for (; i + 4 <= u.items; i += 4) attend_tile<V, T, 4>(a, u, i, segment, states);
    switch (u.items - i) {
        case 3: return attend_tile<V, T, 3>(a, u, i, segment, states);
        case 2: return attend_tile<V, T, 2>(a, u, i, segment, states);
        case 1: return attend_tile<V, T, 1>(a, u, i, segment, states);
    }
}

template <class V>
void attend_segment(const Attention& a, const Unit& u, int64_t segment, float* states) {
    if (a.bf16) attend_items<V, uint16_t>(a, u, segment, states);
    else attend_items<V, float>(a, u, segment, states);
}

template <class V>
void attend_merge(float* state, const float* next, int64_t head_dim) {
    const auto m0 = V::set1(state[0]), m1 = V::set1(next[0]), top = V::max(m0, m1);
    const auto f0 = exp<V>(V::sub(m0, top)), f1 = exp<V>(V::sub(m1, top));
    const auto sum = V::fma(V::set1(state[1]), f0, V::mul(V::set1(next[1]), f1));
    V::storen(state, top, 1);
    V::storen(state + 1, sum, 1);
    for (int64_t d = 16; d < state_floats(head_dim); d += 16)
        V::store(state + d, V::fma(V::load(state + d), f0, V::mul(V::load(next + d), f1)));
}

template <class V>
void attend_finish(const float* state, int64_t head_dim, float* out) {
    const auto inverse = V::div(V::set1(1.0f), V::set1(state[1]));
    for (int64_t d = 0; d < head_dim; d += 16)
        V::storen(out + d, V::mul(V::load(state + 16 + d), inverse), head_dim - d < 16 ? head_dim - d : 16);
}

}  // namespace
}  // namespace obole

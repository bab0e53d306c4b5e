// Attention over a paged cache, one segment of 256 positions at a time, a few queries of one key/value head together.
//
// The arithmetic of a query depends on its own position and context alone:
//   score_j   = scale * sum over d of q[d] k_j[d] (fma, d in order), softcapped, for each visible position j
//   weight_j  = exp(score_j - largest score of the segment)
//   sum       = over 16 lanes (position mod 16), in order of blocks, then across lanes
//   value[d]  = fma(weight_j, v_j[d], value[d]), j in order
// Where keys and values have scales, k_j and v_j are the codes; the sum is multiplied by the key's scale, and weight_j, once
// it has been counted in the sum, by the value's.
// Segments are merged in order by attend_merge. Positions that a query does not see take no part, not even with
// weight 0: their memory may hold anything.
#pragma once

#include <cstdint>

#include "isa.h"
#include "kernel_math.h"

namespace obole {
namespace {

// An element of the pool, as it is stored.
struct Bf16Bits {
    uint16_t bits;
};
struct E4m3Bits {
    uint8_t bits;
};

template <class V>
inline typename V::F load_kv(const float* p) {
    return V::load(p);
}
template <class V>
inline typename V::F load_kv(const Bf16Bits* p) {
    return V::bf16(p);
}
template <class V>
inline typename V::F load_kv(const int8_t* p) {
    return V::i8(p);
}
template <class V>
inline typename V::F load_kv(const E4m3Bits* p) {
    return V::e4m3(p);
}
template <class V, class T>
inline typename V::F load_kv(const T* p, int64_t n) {
    T x[16] = {};
    __builtin_memcpy(x, p, static_cast<size_t>(n) * sizeof(T));
    return load_kv<V>(x);
}

// What load_kv makes of a code, times this, is what the code means.
template <class T>
constexpr float unit = 1.0f;
template <>
inline constexpr float unit<E4m3Bits> = 256.0f;

// Blocks, or registers of values, that a tile of N queries takes at once.
template <class V, int N>
constexpr int tile_width = V::sums < N ? 1 : V::sums / N > 4 ? 4 : V::sums / N;

constexpr int64_t kScoreRow = kSegment + 16;  // no power of two: the rows of many queries lie in different sets of the cache

// The part of one segment that a unit's queries see.
struct Seen {
    const float* q[kItems];
    int64_t from[kItems], to[kItems];  // positions [from, to) that the query sees in this segment
    int64_t low, high;                 // the smallest `from` and the largest `to`
    int64_t base;                      // position of score[.][0]: `low` rounded down to a block
    alignas(64) float score[kItems][kScoreRow];
};

// The blocks that hold it, from the one at `base` on.
template <class T>
struct Blocks {
    const T *k[kSegment / kBlock], *v[kSegment / kBlock];
    const float *scale_k[kSegment / kBlock], *scale_v[kSegment / kBlock];  // set for formats with scales
};

inline bool place(const Attention& a, const Unit& u, int64_t segment, Seen& s) {
    const int64_t group = a.heads / a.kv_heads, begin = segment * kSegment, end = begin + kSegment;
    s.low = end, s.high = begin;
    for (int64_t i = 0; i < u.items; ++i) {
        const int64_t row = (u.first + i) / group, head = u.kv_head * group + (u.first + i) % group;
        const int64_t position = a.pos_starts[u.sequence] + row, oldest = position - a.window + 1;
        s.q[i] = a.q + (a.row_starts[u.sequence] + row) * a.q_row + head * a.q_head;
        s.from[i] = oldest > begin ? oldest : begin;
        s.to[i] = position + 1 < end ? position + 1 : end;
        if (s.from[i] >= s.to[i]) continue;
        if (s.from[i] < s.low) s.low = s.from[i];
        if (s.to[i] > s.high) s.high = s.to[i];
    }
    s.base = s.low / kBlock * kBlock;
    return s.low < s.high;
}

template <class T>
inline void find_blocks(const Attention& a, const Unit& u, const Seen& s, Blocks<T>& blocks) {
    const int64_t stride = a.head_dim * kBlock;
    for (int64_t p = s.base; p < s.high; p += kBlock) {
        const int64_t b = (p - s.base) / kBlock;
        const int64_t head = a.table[u.sequence * a.table_row + p / kBlock] * a.kv_heads + u.kv_head;
        blocks.k[b] = static_cast<const T*>(a.pool.k) + head * stride;
        blocks.v[b] = static_cast<const T*>(a.pool.v) + head * stride;
        if (!has_scales(a.pool.format)) continue;
        blocks.scale_k[b] = a.pool.scale_k + head * kBlock;
        blocks.scale_v[b] = a.pool.scale_v + head * kBlock;
    }
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

// Scores of N queries from `item` on, over B blocks of keys; `offset`: of the first one's positions from `base`. E is what the
// keys are read as, T what they are stored as.
template <class V, class T, class E, int N, int B>
inline void score_blocks(const Attention& a, const E* const* k, const float* const* scales, int64_t item, int64_t offset,
                         Seen& s) {
    typename V::F acc[N][B];
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
            const auto q = V::set1(s.q[item + i][d]);
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) acc[i][b] = V::fma(q, key[b], acc[i][b]);
        }
    }
    for (int b = 0; b < B; ++b) {
        const int64_t p = s.base + offset + b * kBlock;
        for (int i = 0; i < N; ++i) {
            const int64_t first = s.from[item + i] - p, last = s.to[item + i] - p;
            const int64_t from = first < 0 ? 0 : first > kBlock ? kBlock : first;
            const int64_t to = last < from ? from : last > kBlock ? kBlock : last;
            auto score = acc[i][b];
            if constexpr (sizeof(T) == 1) score = V::mul(score, V::mul(V::load(scales[b]), V::set1(unit<T>)));
            V::store(s.score[item + i] + offset + b * kBlock, V::keep(capped<V>(a, score), from, to, -__builtin_inff()));
        }
    }
}

template <class V, class T, int N, class E>
inline void score_tile(const Attention& a, const E* const* k, const float* const* scales, int64_t blocks, int64_t item,
                       int64_t offset, Seen& s) {
    constexpr int B = tile_width<V, N>;
    int64_t b = 0;
    for (; b + B <= blocks; b += B) score_blocks<V, T, E, N, B>(a, k + b, scales + b, item, offset + b * kBlock, s);
    if constexpr (B > 1)
        for (; b < blocks; ++b) score_blocks<V, T, E, N, 1>(a, k + b, scales + b, item, offset + b * kBlock, s);
}

// Scores to weights; the largest score and the sum of weights go to the head of each query's state. The scales of values
// are multiplied into the weights.
template <class V, class T>
inline void weigh(const Blocks<T>& blocks, int64_t items, Seen& s, float* states, int64_t stride) {
    const int64_t n = s.high - s.base;
    for (int64_t i = 0; i < items; ++i, states += stride) {
        if (s.from[i] >= s.to[i]) continue;
        auto top = V::set1(-__builtin_inff()), sum = V::zero();
        for (int64_t j = 0; j < n; j += kBlock) top = V::max(top, V::load(s.score[i] + j));
        const float largest = V::hmax(top);
        const auto shift = V::set1(largest);
        for (int64_t j = 0; j < n; j += kBlock) {
            auto w = exp<V>(V::sub(V::load(s.score[i] + j), shift));
            sum = V::add(sum, w);
            if constexpr (sizeof(T) == 1) w = V::mul(w, V::mul(V::load(blocks.scale_v[j / kBlock]), V::set1(unit<T>)));
            V::store(s.score[i] + j, w);
        }
        states[0] = largest;
        states[1] = V::hsum(sum);
    }
}

// Blocks of values of type E from position `first` on, which begins one, and the number of dimensions.
template <class E>
struct Values {
    const E* const* v;
    int64_t first, head_dim;

    const E* at(int64_t position) const {
        return v[(position - first) / kBlock] + (position - first) % kBlock * head_dim;
    }
};

// Adds the weighted values of positions [low, high), seen by all N queries from `item` on, to their `sums`: 16 C dimensions
// from `d` on, or the `lanes` last ones where that is less than 16.
template <class V, class E, int N, int C, bool whole>
inline void add_values(const Values<E>& values, int64_t low, int64_t high, int64_t item, int64_t d, int64_t lanes,
                       const Seen& s, float* sums, int64_t stride) {
    typename V::F acc[N][C];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[i][c] = V::load(sums + i * stride + d + 16 * c);
    const float* weights = s.score[item] + (low - s.base);
    while (low < high) {
        const E* v = values.at(low) + d;
        const int64_t block_end = low / kBlock * kBlock + kBlock, end = block_end < high ? block_end : high;
        for (; low < end; ++low, ++weights, v += values.head_dim) {
            typename V::F value[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) value[c] = whole ? load_kv<V>(v + 16 * c) : load_kv<V>(v, lanes);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) {
                const auto w = V::set1(weights[i * kScoreRow]);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) acc[i][c] = V::fma(w, value[c], acc[i][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) V::store(sums + i * stride + d + 16 * c, acc[i][c]);
}

template <class V, class E, int N>
inline void add_values(const Values<E>& values, int64_t low, int64_t high, int64_t item, const Seen& s, float* sums,
                       int64_t stride) {
    constexpr int C = tile_width<V, N>;
    const int64_t n = values.head_dim;
    int64_t d = 0;
    for (; d + 16 * C <= n; d += 16 * C) add_values<V, E, N, C, true>(values, low, high, item, d, 16, s, sums, stride);
    if constexpr (C > 1)
        for (; d + 16 <= n; d += 16) add_values<V, E, N, 1, true>(values, low, high, item, d, 16, s, sums, stride);
    if (d < n) add_values<V, E, N, 1, false>(values, low, high, item, d, n - d, s, sums, stride);
}

// The same for the positions among [low, high) that each of the N queries sees: those that all see in one go, the few before
// and after these query by query. Every query gets its positions in order.
template <class V, int N, class E>
inline void value_tile(const Values<E>& values, int64_t low, int64_t high, int64_t item, const Seen& s, float* sums,
                       int64_t stride) {
    sums += item * stride;
    int64_t from = low, to = high;  // seen by all N
    for (int i = 0; i < N; ++i) {
        if (s.from[item + i] > from) from = s.from[item + i];
        if (s.to[item + i] < to) to = s.to[item + i];
    }
    if (from > to) from = to = high;
    const auto alone = [&](int64_t begin, int64_t end) {
        for (int i = 0; i < N && begin < end; ++i) {
            const int64_t first = s.from[item + i] > begin ? s.from[item + i] : begin;
            const int64_t last = s.to[item + i] < end ? s.to[item + i] : end;
            add_values<V, E, 1>(values, first, last, item + i, s, sums + i * stride, stride);
        }
    };
    alone(low, from);
    if (from < to) add_values<V, E, N>(values, from, to, item, s, sums, stride);
    alone(to, high);
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// f(Count, first) over tiles of at most 4 queries.
template <class F>
inline void over_tiles(int64_t items, F&& f) {
    int64_t i = 0;
    for (; i + 4 <= items; i += 4) f(Count<4>{}, i);
    switch (items - i) {
        case 3: return f(Count<3>{}, i);
        case 2: return f(Count<2>{}, i);
        case 1: return f(Count<1>{}, i);
    }
}

// Elements of one block of keys or values as floats: exact.
template <class V, class T>
inline void widen(const T* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += 16) V::store(to + i, load_kv<V>(from + i));
}

constexpr int64_t kWide = 8192;  // floats that stay in the first-level cache beside the rest
constexpr int64_t kTogether = 4;  // blocks at most that all tiles go over before the next ones

// Asks for blocks [first, last) of keys or values, of `size` elements each, as far as there are so many.
template <class V, class T>
inline void fetch(const T* const* blocks, int64_t first, int64_t last, int64_t count, int64_t size) {
    for (int64_t b = first; b < last && b < count; ++b)
        for (int64_t i = 0; i < size * static_cast<int64_t>(sizeof(T)); i += 64)
            V::prefetch(reinterpret_cast<const char*>(blocks[b]) + i);
}

// A unit's blocks, some together at a time, each lot fetched while the one before is worked on. Where several tiles read
// the same numbers of a narrow format, these are converted once for all (exactly, so that it makes no difference).
template <class V, class T>
struct Segment {
    const Attention& a;
    int64_t items, count, size, together;
    bool shared;
    Seen s;
    Blocks<T> blocks;
    alignas(64) float wide[sizeof(T) < 4 ? kWide : 16];

    explicit Segment(const Attention& attention) : a(attention) {}  // the rest stays as it lies: there is much of it

    bool find(const Unit& u, int64_t segment) {
        items = u.items, size = a.head_dim * kBlock;
        if (!place(a, u, segment, s)) return false;
        find_blocks(a, u, s, blocks);
        count = (s.high - s.base + kBlock - 1) / kBlock;
        shared = sizeof(T) < 4 && items > 4 && size <= kWide;
        together = shared && kWide / size < kTogether ? kWide / size : kTogether;
        return true;
    }

    // f(first, blocks, pointers) for each lot: pointers of floats if shared, else of T.
    template <class F>
    void over_lots(const T* const* from, const T* const* next, F&& f) {
        const float* at[kTogether];
        for (int64_t b = 0; b < kTogether; ++b) at[b] = wide + (shared ? b * size : 0);
        for (int64_t first = 0; first < count; first += together) {
            const int64_t left = count - first, n = left < together ? left : together;
            if (left > together) fetch<V>(from, first + together, first + 2 * together, count, size);
            else if (next) fetch<V>(next, 0, together, count, size);
            if (!shared) {
                f(first, n, from + first);
                continue;
            }
            if constexpr (sizeof(T) < 4) {
                for (int64_t b = 0; b < n; ++b) widen<V>(from[first + b], size, wide + b * size);
                f(first, n, static_cast<const float* const*>(at));
            }
        }
    }

    void score() {
        over_lots(blocks.k, blocks.v, [&](int64_t first, int64_t n, auto k) {
            over_tiles(items, [&](auto queries, int64_t item) {
                score_tile<V, T, queries.value>(a, k, blocks.scale_k + first, n, item, first * kBlock, s);
            });
        });
    }

    void add(float* sums, int64_t stride) {
        over_lots(blocks.v, nullptr, [&](int64_t first, int64_t n, auto v) {
            const int64_t p = s.base + first * kBlock, end = p + n * kBlock;
            const int64_t low = p > s.low ? p : s.low, high = end < s.high ? end : s.high;
            over_tiles(items, [&](auto queries, int64_t item) {
                value_tile<V, queries.value>(values_of(v, p), low, high, item, s, sums, stride);
            });
        });
    }

    template <class E>
    Values<E> values_of(const E* const* v, int64_t first) const {
        return {v, first, a.head_dim};
    }
};

template <class V, class T>
void attend_items(const Attention& a, const Unit& u, int64_t segment, float* states) {
    Segment<V, T> part(a);
    if (!part.find(u, segment)) return;
    const int64_t stride = state_floats(a.head_dim);
    for (int64_t i = 0; i < u.items; ++i) __builtin_memset(states + i * stride, 0, static_cast<size_t>(stride) * 4);
    part.score();
    weigh<V>(part.blocks, u.items, part.s, states, stride);
    part.add(states + 16, stride);
}

template <class V>
void attend_segment(const Attention& a, const Unit& u, int64_t segment, float* states) {
    switch (a.pool.format) {
        case KvFormat::F32: return attend_items<V, float>(a, u, segment, states);
        case KvFormat::BF16: return attend_items<V, Bf16Bits>(a, u, segment, states);
        case KvFormat::INT8: return attend_items<V, int8_t>(a, u, segment, states);
        case KvFormat::FP8: return attend_items<V, E4m3Bits>(a, u, segment, states);
    }
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

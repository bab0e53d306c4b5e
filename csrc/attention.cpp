// Attention over whole batches: units of queries, each over its segments in order.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ops.h"

namespace obole {

namespace {

struct Span {
    int64_t first, last;  // segments that are seen
};

Span segments_of(const Attention& a, const Unit& u, int64_t item) {
    const int64_t position = a.pos_starts[u.sequence] + (u.first + item) / (a.heads / a.kv_heads);
    return {std::max<int64_t>(0, position - a.window + 1) / kSegment, position / kSegment};
}

Span segments_of(const Attention& a, const Unit& u) {
    return {segments_of(a, u, 0).first, segments_of(a, u, u.items - 1).last};
}

void check(const Attention& a, int64_t rows) {
    int64_t next = 0;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t first = a.row_starts[s], last = a.row_starts[s + 1];
        if (first != next || last < first) throw std::invalid_argument("row_starts must count up from 0 to the number of rows");
        next = last;
        if (last == first) continue;
        if (a.pos_starts[s] < 0 || (a.pos_starts[s] + (last - first) - 1) / kBlock >= a.table_row)
            throw std::invalid_argument("a position of a sequence lies outside its row of the block table");
    }
    if (next != rows) throw std::invalid_argument("row_starts must count up from 0 to the number of rows");
}

std::vector<Unit> make_units(const Attention& a) {
    std::vector<Unit> units;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const int64_t items = (a.row_starts[s + 1] - a.row_starts[s]) * (a.heads / a.kv_heads);
        for (int64_t first = 0; first < items; first += kItems)
            for (int64_t h = 0; h < a.kv_heads; ++h) units.push_back({s, h, first, std::min(kItems, items - first)});
    }
    return units;
}

// Folds the partial results of one segment into the running ones: the only way segments ever meet.
void fold(const Kernels& k, const Attention& a, const Unit& u, int64_t segment, const float* next, float* states) {
    const int64_t stride = state_floats(a.head_dim);
    for (int64_t i = 0; i < u.items; ++i, next += stride, states += stride) {
        const Span seen = segments_of(a, u, i);
        if (segment < seen.first || segment > seen.last) continue;
        if (segment == seen.first) std::memcpy(states, next, static_cast<size_t>(stride) * 4);
        else k.attend_merge(states, next, a.head_dim);
    }
}

void finish(const Kernels& k, const Attention& a, const Unit& u, const float* states) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t i = 0; i < u.items; ++i) {
        const int64_t row = a.row_starts[u.sequence] + (u.first + i) / group, head = u.kv_head * group + (u.first + i) % group;
        k.attend_finish(states + i * state_floats(a.head_dim), a.head_dim, a.out + (row * a.heads + head) * a.head_dim);
    }
}

float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if (memory.size() < static_cast<size_t>(floats)) memory.resize(static_cast<size_t>(floats));
    return memory.data();
}

}  // namespace

void Ops::attention(const Attention& a, int64_t rows) {
    check(a, rows);
    const std::vector<Unit> units = make_units(a);
    const int64_t size = kItems * state_floats(a.head_dim), n = static_cast<int64_t>(units.size());
    std::vector<int64_t> starts(units.size() + 1, 0);  // of each unit's segments in the list of all
    for (int64_t i = 0; i < n; ++i) {
        const Span span = segments_of(a, units[i]);
        starts[i + 1] = starts[i] + span.last - span.first + 1;
    }
    if (n >= 4 * threads() || starts[n] == n || threads() == 1) {
        pool_.run(n, [&](int64_t i) {
            const Unit& u = units[i];
            float* states = scratch(2 * size);
            const Span span = segments_of(a, u);
            for (int64_t segment = span.first; segment <= span.last; ++segment) {
                k_.attend_segment(a, u, segment, states + size);
                fold(k_, a, u, segment, states + size, states);
            }
            finish(k_, a, u, states);
        });
        return;
    }
    // Too few units to keep the threads busy: one chunk for each segment, folded in the same order afterwards.
    int64_t items = 0;
    for (const Unit& u : units) items = std::max(items, u.items);
    const int64_t part = items * state_floats(a.head_dim);
    const std::unique_ptr<float[]> partial(new float[static_cast<size_t>(starts[n] * part)]);
    pool_.run(starts[n], [&](int64_t i) {
        const int64_t unit = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
        const int64_t segment = segments_of(a, units[unit]).first + i - starts[unit];
        k_.attend_segment(a, units[unit], segment, partial.get() + i * part);
    });
    float* states = scratch(size);
    for (int64_t unit = 0; unit < n; ++unit) {
        const int64_t first = segments_of(a, units[unit]).first;
        for (int64_t i = starts[unit]; i < starts[unit + 1]; ++i)
            fold(k_, a, units[unit], first + i - starts[unit], partial.get() + i * part, states);
        finish(k_, a, units[unit], states);
    }
}

}  // namespace obole

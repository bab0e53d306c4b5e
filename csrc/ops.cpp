#include "ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv_store.h"

namespace obole {

namespace {

// What a chunk of a product should amount to, about five microseconds by whichever takes longer: weights read, or products.
constexpr int64_t kChunkBytes = 128 << 10, kChunkProducts = 1536 << 10;
constexpr int64_t kPadRows = 3;  // that a kernel may read beyond the last one
constexpr int64_t kPanelBytes = 512 << 10;  // activations of the rows done together: they stay in the second-level cache

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Store>
void write_row(const Store& store, const float* k, int64_t k_head, const float* v, int64_t v_head, int64_t kv_heads,
               int64_t head_dim, int64_t slot) {
    const int64_t block = slot / kBlock, offset = slot % kBlock, size = head_dim * kBlock;
    for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t head = block * kv_heads + h;
        store.key(k + h * k_head, head_dim, head * size + offset, head * kBlock + offset);
        store.value(v + h * v_head, head_dim, head * size + offset * head_dim, head * kBlock + offset);
    }
}

}  // namespace

void Ops::linear(const Packed& w, const float* x, int64_t x_row, int64_t rows, float* out) {
    const int64_t inputs = w.inputs(), groups = inputs / kGroup;
    const auto& parts = w.parts();
    const bool quantised = std::any_of(parts.begin(), parts.end(), [](const Part& p) { return !is_float(p.kind); });
    static thread_local std::vector<Group> memory;  // grows to the largest batch and stays
    if (quantised) {
        const auto size = static_cast<size_t>((rows + kPadRows) * groups);  // what is behind the rows is read, not used
        if (memory.size() < size) memory.resize(size);
        Group* acts = memory.data();
        over_rows(rows, inputs, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; ++r) k_.quantize(x + r * x_row, inputs, acts + r * groups);
        });
    }
    const Group* acts = memory.data();

    const int64_t row_bytes = quantised ? groups * static_cast<int64_t>(sizeof(Group)) : inputs * 4;
    const int64_t panel = std::clamp<int64_t>(kPanelBytes / std::max<int64_t>(row_bytes, 1) / 8 * 8, 32, 256);
    const int64_t panels = ceil_div(rows, panel);
    const int64_t block_products = std::max<int64_t>(1, std::min(rows, panel) * inputs * kColumns);
    struct Run {
        const Part* part;
        int64_t step, chunks;  // column blocks a chunk, chunks a panel
    };
    std::vector<Run> runs;
    int64_t chunks = 0;
    for (const Part& p : parts) {
        const int64_t step = std::clamp<int64_t>(
            std::min(kChunkBytes / std::max<int64_t>(p.block_bytes, 1), kChunkProducts / block_products), 1,
            std::max<int64_t>(1, w.outputs() / (kColumns * 4 * threads())));
        runs.push_back({&p, step, ceil_div(p.blocks, step)});
        chunks += runs.back().chunks;
    }
    pool_.run(panels * chunks, [&](int64_t i) {
        const int64_t row = i / chunks * panel;
        int64_t chunk = i % chunks;
        const Run* run = runs.data();
        while (chunk >= run->chunks) chunk -= run->chunks, ++run;
        const int64_t first = chunk * run->step, last = std::min(first + run->step, run->part->blocks);
        k_.product(*run->part, first, last, quantised ? acts + row * groups : nullptr, x + row * x_row, x_row,
                   std::min(panel, rows - row), out + row * w.outputs(), w.outputs());
    });
}

void Ops::adapt(const Packed& down, const Packed& up, const float* x, int64_t x_row, const int32_t* ids, int32_t id,
                int64_t rows, float* out, int64_t out_row) {
    const int64_t rank = down.outputs(), outputs = up.outputs();
    static thread_local std::vector<float> memory;  // grows to the largest batch and stays
    for (int64_t first = 0; first < rows; ++first) {
        if (ids[first] != id) continue;
        int64_t last = first + 1;  // rows that lie together are computed together
        while (last < rows && ids[last] == id) ++last;
        const int64_t count = last - first;
        if (memory.size() < static_cast<size_t>(count * (rank + outputs))) memory.resize(count * (rank + outputs));
        float *low = memory.data(), *more = low + count * rank;
        linear(down, x + first * x_row, x_row, count, low);
        linear(up, low, rank, count, more);
        add(out + first * out_row, out_row, more, outputs, count, outputs);
        first = last;
    }
}

void Ops::embed(const Packed& w, const int32_t* ids, int64_t n, float scale, float* out) {
    for (int64_t i = 0; i < n; ++i)
        if (ids[i] < 0 || ids[i] >= w.outputs())
            throw std::out_of_range("there is no row " + std::to_string(ids[i]) + " in an embedding of " +
                                    std::to_string(w.outputs()));
    over_rows(n, w.inputs(), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) w.dequantize(ids[i], scale, out + i * w.inputs());
    });
}

void Ops::rms_norm(const float* x, int64_t rows, int64_t x_row, int64_t heads, int64_t x_head, int64_t n,
                   const float* weight, float eps, float* out) {
    over_rows(rows, heads * n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            for (int64_t h = 0; h < heads; ++h)
                k_.rms_norm(x + r * x_row + h * x_head, weight, n, eps, out + (r * heads + h) * n);
    });
}

void Ops::add_rms_norm(const float* x, int64_t x_row, float* residual, int64_t residual_row, int64_t rows, int64_t n,
                       const float* weight, float eps, float* out) {
    over_rows(rows, n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            k_.add(residual + r * residual_row, x + r * x_row, n);
            k_.rms_norm(residual + r * residual_row, weight, n, eps, out + r * n);
        }
    });
}

void Ops::add(float* residual, int64_t residual_row, const float* x, int64_t x_row, int64_t rows, int64_t n) {
    over_rows(rows, n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) k_.add(residual + r * residual_row, x + r * x_row, n);
    });
}

void Ops::rope(float* x, int64_t rows, int64_t x_row, int64_t heads, int64_t x_head, int64_t half, const int32_t* positions,
               const float* cos, const float* sin) {
    over_rows(rows, heads * half * 2, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            for (int64_t h = 0; h < heads; ++h)
                k_.rope(x + r * x_row + h * x_head, cos + positions[r] * half, sin + positions[r] * half, half);
    });
}

void Ops::kv_write(const float* k, int64_t k_row, int64_t k_head, const float* v, int64_t v_row, int64_t v_head,
                   int64_t rows, int64_t kv_heads, int64_t head_dim, const KvPool& pool, const int32_t* slots) {
    const auto write = [&](const auto& store) {
        over_rows(rows, 2 * kv_heads * head_dim, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; ++r)
                write_row(store, k + r * k_row, k_head, v + r * v_row, v_head, kv_heads, head_dim, slots[r]);
        });
    };
    switch (pool.format) {
        case KvFormat::F32: return write(Rounded<float>(pool));
        case KvFormat::BF16: return write(Rounded<Bf16>(pool));
        case KvFormat::INT8: return write(Scaled<Int8>(pool));
        case KvFormat::FP8: return write(Scaled<E4m3>(pool));
    }
}

void Ops::gated(bool silu, const float* x, int64_t x_row, int64_t rows, int64_t n, float* out) {
    const auto function = silu ? k_.silu_mul : k_.gelu_tanh_mul;
    over_rows(rows, 4 * n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) function(x + r * x_row, x + r * x_row + n, n, out + r * n);
    });
}

void Ops::argmax(const float* x, int64_t x_row, int64_t rows, int64_t n, int64_t* out) {
    over_rows(rows, n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) out[r] = k_.argmax(x + r * x_row, n);
    });
}

void Ops::confidence(const float* x, int64_t x_row, const int64_t* best, int64_t rows, int64_t n, float* out) {
    over_rows(rows, 4 * n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) out[r] = 1.0f / k_.exp_sum(x + r * x_row, n, x[r * x_row + best[r]]);
    });
}

void Ops::gumbel(uint64_t seed, uint64_t position, const int64_t* ids, int64_t n, float* out) {
    constexpr int64_t step = 2048;
    pool_.run(ceil_div(n, step), [&](int64_t i) {
        const int64_t first = i * step, m = std::min(step, n - first);
        k_.gumbel(seed, position, ids ? ids + first : nullptr, first, m, out + first);
    });
}

}  // namespace obole

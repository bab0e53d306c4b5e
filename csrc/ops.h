// The operations on whole tensors: cut into chunks, run on the pool. Pointers and strides come from the Python side,
// which has checked shapes; strides are in elements.
#pragma once

#include <cstdint>

#include "isa.h"
#include "pack.h"
#include "pool.h"

namespace obole {

class Ops {
public:
    Ops(const Kernels* kernels, int threads) : k_(*kernels), pool_(threads) {}

    const char* name() const { return k_.name; }
    int threads() const { return pool_.threads(); }
    Pool& pool() { return pool_; }

    void linear(const Packed& w, const float* x, int64_t x_row, int64_t rows, float* out);
    // out[r] += up(down(x[r])) for the rows r whose id is `id`, and for no others.
    void adapt(const Packed& down, const Packed& up, const float* x, int64_t x_row, const int32_t* ids, int32_t id,
               int64_t rows, float* out, int64_t out_row);
    // Throws std::out_of_range for an id that is no row of w.
    void embed(const Packed& w, const int32_t* ids, int64_t n, float scale, float* out);
    // x[rows][heads][n] with strides; out is contiguous.
    void rms_norm(const float* x, int64_t rows, int64_t x_row, int64_t heads, int64_t x_head, int64_t n,
                  const float* weight, float eps, float* out);
    void add_rms_norm(const float* x, int64_t x_row, float* residual, int64_t residual_row, int64_t rows, int64_t n,
                      const float* weight, float eps, float* out);
    void add(float* residual, int64_t residual_row, const float* x, int64_t x_row, int64_t rows, int64_t n);
    void rope(float* x, int64_t rows, int64_t x_row, int64_t heads, int64_t x_head, int64_t half, const int32_t* positions,
              const float* cos, const float* sin);
    void kv_write(const float* k, int64_t k_row, int64_t k_head, const float* v, int64_t v_row, int64_t v_head, int64_t rows,
                  int64_t kv_heads, int64_t head_dim, const KvPool& pool, const int32_t* slots);
    // Throws std::invalid_argument where row_starts, pos_starts and the table do not fit together.
    void attention(const Attention& a, int64_t rows);
    void gated(bool silu, const float* x, int64_t x_row, int64_t rows, int64_t n, float* out);
    void argmax(const float* x, int64_t x_row, int64_t rows, int64_t n, int64_t* out);
    // out[r] = exp(x[r][best[r]]) over the sum of exp(x[r]).
    void confidence(const float* x, int64_t x_row, const int64_t* best, int64_t rows, int64_t n, float* out);
    void gumbel(uint64_t seed, uint64_t position, const int64_t* ids, int64_t n, float* out);

private:
    // body(first, last) over rows, in chunks of about 8,192 elements
    template <class Body>
    void over_rows(int64_t rows, int64_t elements, Body&& body) {
        const int64_t step = elements >= 8192 ? 1 : 8192 / (elements > 0 ? elements : 1);
        pool_.run((rows + step - 1) / step,
                  [&](int64_t i) { body(i * step, (i + 1) * step < rows ? (i + 1) * step : rows); });
    }

    const Kernels& k_;
    Pool pool_;
};

}  // namespace obole

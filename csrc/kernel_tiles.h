// Products of quantised weights with many rows of activations, where the processor multiplies whole tiles of bytes. The
// arithmetic, and so every bit, is that of kernel_linear.h; only the sums within a group, which are exact, come from tiles:
//
//   a packed tile, unpacked, less its zero point     8 quads x 16 columns x 4 bytes    as it lies in memory: operand b
//   the same group of up to 16 rows                  rows x 32 bytes                   rows are strided: operand a
//   their product                                    rows x 16 sums                    operand c, weighed row by row
//
// For kinds with scales per 16 inputs a product has half the depth, and there are two of them.
//
// A run of packed tiles is unpacked into the first-level cache and serves up to 128 rows. The sums of four products are
// on their way through the tile unit while those of the four before are weighed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernel_linear.h"
#include "tiles.h"

namespace obole {
namespace {

// With fewer rows than this, no tiles. Not measured but counted, for a core that starts two vector instructions a cycle: with
// VNNI a row takes 12 of them for a packed tile (8 dot products, and 4 to weigh the sum; 16 for Q6_K), or 6 cycles, and 5 to
// 7 rows are padded to 8. With tiles it takes 3 or 4 (6 for Q6_K), or 2 cycles, and all rows together about 16 cycles to store
// what was unpacked and to load, multiply and store tiles. So 4 rows take about 24 cycles either way, but 5 take 48 or 26.
constexpr int64_t kFewestTileRows = 5;

constexpr int kRun = 8;        // packed tiles that are unpacked at a time: as many as share the header of a K kind
constexpr int kRowTiles = 8;   // that use them while they are there
constexpr int kProducts = 4;   // tiles of sums on their way; of the four registers left two each hold operands a and b

// Rows cut into tiles of one height, because another would need another configuration. So the last tiles may begin early
// and share rows with those before: computed twice, with the same bits.
struct RowTiles {
    explicit RowTiles(int64_t rows)
        : rows(rows), count((rows + kTileRows - 1) / kTileRows), height(static_cast<int>((rows + count - 1) / count)) {}

    int64_t start(int64_t tile) const { return std::min(tile * height, rows - height); }

    int64_t rows, count;
    int height;
};

constexpr int depth_of(Format q) { return kGroup / parts_of(q); }

// Registers 0..3: sums; 4, 5: rows of activations; 6, 7: weights.
constexpr TileConfig tile_config(int rows, int depth) {
    TileConfig config;
    for (int t = 0; t < kTileRegisters; ++t) {
        config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : depth / 4);
        config.row_bytes[t] = static_cast<uint16_t>(t < 4 || t >= 6 ? kTileBytes : depth);
    }
    return config;
}

template <class V, Format Q>
struct TileScratch {
    alignas(64) int8_t code[kRun][kGroup * kColumns];
    Scales<V, Q> scale[kRun];
    alignas(64) int32_t sum[2][kProducts][kTileRows][kColumns];
    alignas(64) float acc[kRowTiles][kTileRows][kColumns];
};

// `n` packed tiles from `w` on, less their zero points, into scratch; returns what lies behind them. `ahead`: see product_rows.
template <class V, Format Q>
const uint8_t* unpack_run(const uint8_t* w, int n, int64_t ahead, TileScratch<V, Q>& scratch) {
    auto d = V::zero(), dmin = V::zero();
    if constexpr (Q.is_k) {
        d = V::half(w);
        if constexpr (Q.has_min) dmin = V::half(w + 32);
        w += Q.header_bytes();
    }
    for (int t = 0; t < n; ++t, w += Q.tile_bytes()) {
        typename V::I code[8];
        unpack<V, Q>(w + Q.scale_bytes(), code);
        for (int q = 0; q < 8; ++q) {
            if constexpr (Q.zero_shift >= 0) code[q] = V::less(code[q], 1 << Q.zero_shift);
            V::istore(scratch.code[t] + 64 * q, code[q]);
        }
        scratch.scale[t] = scales<V, Q>(w, d, dmin);
        if (ahead)
            for (int b = 0; b < Q.tile_bytes(); b += 64) V::prefetch(w + ahead + b);
    }
    return w;
}

// The first `n` of kProducts products: of codes one after the other with the groups from `a` on.
template <class Tiles, Format Q, int... R>
inline void multiply_tiles(Tiles& tiles, const int8_t* code, const Group* a, int64_t groups, int n,
                           int32_t (*sum)[kTileRows][kColumns], std::integer_sequence<int, R...>) {
    constexpr int depth = depth_of(Q), parts = parts_of(Q);
    const int64_t stride = groups * static_cast<int64_t>(sizeof(Group));
    const auto multiply = [&]<int r>(std::integral_constant<int, r>) {
        if (r >= n) return;
        tiles.template zero<r>();
        tiles.template load<4 + r % 2>(a[r / parts].code + r % parts * depth, stride);
        tiles.template load<6 + r % 2>(code + r * depth * kColumns, kTileBytes);
        tiles.template multiply<r, 4 + r % 2, 6 + r % 2>();
    };
    const auto store = [&]<int r>(std::integral_constant<int, r>) {
        if (r < n) tiles.template store<r>(sum[r], kTileBytes);
    };
    (multiply(std::integral_constant<int, R>()), ...);
    (store(std::integral_constant<int, R>()), ...);
}

// The sums of N packed tiles, weighed one after the other, on top of each row's `acc`.
template <class V, Format Q, int N>
inline void weigh_rows(const int32_t (*sum)[kTileRows][kColumns], const Scales<V, Q>* scale, const Group* a, int64_t groups,
                       int rows, float (*acc)[kColumns]) {
    Scales<V, Q> s[N];
    for (int t = 0; t < N; ++t) s[t] = scale[t];
    for (int r = 0; r < rows; ++r, a += groups) {
        auto x = V::load(acc[r]);
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) {
            typename V::I parts[parts_of(Q)];
            for (int part = 0; part < parts_of(Q); ++part) parts[part] = V::iload(sum[t * parts_of(Q) + part][r]);
            x = weigh<V, Q>(x, parts, s[t], a[t]);
        }
        V::store(acc[r], x);
    }
}

// One column block with the row tiles [first, first + count).
template <class V, class Tiles, Format Q>
void tile_rows(Tiles& tiles, const uint8_t* w, int64_t groups, const Group* acts, const RowTiles& rows, int64_t first,
               int count, int64_t ahead, TileScratch<V, Q>& scratch) {
    constexpr int together = kProducts / parts_of(Q);  // packed tiles
    std::fill_n(&scratch.acc[0][0][0], count * kTileRows * kColumns, 0.0f);
    for (int64_t g = 0; g < groups; g += kRun) {
        const int run = static_cast<int>(std::min<int64_t>(kRun, groups - g)), steps = (run + together - 1) / together;
        w = unpack_run<V, Q>(w, run, ahead, scratch);
        // Step i is packed tiles i % steps * together and following, with row tile i / steps.
        const auto with = [&](int i, auto&& work) {
            const int t = i % steps * together;
            work(i / steps, t, std::min(together, run - t), acts + rows.start(first + i / steps) * groups + g + t);
        };
        for (int i = 0; i <= count * steps; ++i) {
            if (i < count * steps)
                with(i, [&](int, int t, int n, const Group* a) {
                    multiply_tiles<Tiles, Q>(tiles, scratch.code[t], a, groups, n * parts_of(Q), scratch.sum[i % 2],
                                             std::make_integer_sequence<int, kProducts>());
                });
            if (i > 0)
                with(i - 1, [&](int tile, int t, int n, const Group* a) {
                    const auto* sum = scratch.sum[(i - 1) % 2];
                    if (n == together)
                        return weigh_rows<V, Q, together>(sum, scratch.scale + t, a, groups, rows.height, scratch.acc[tile]);
                    for (int j = 0; j < n; ++j)
                        weigh_rows<V, Q, 1>(sum + j * parts_of(Q), scratch.scale + t + j, a + j, groups, rows.height,
                                            scratch.acc[tile]);
                });
        }
    }
}

template <class V, class Tiles, Format Q>
void tile_product(const Operands& o, int64_t first, int64_t last, int64_t num_rows) {
    const Part& p = o.part;
    const RowTiles rows(num_rows);
    Tiles tiles(tile_config(rows.height, depth_of(Q)));
    TileScratch<V, Q> scratch;
    for (int64_t block = first; block < last; ++block)
        for (int64_t tile = 0; tile < rows.count; tile += kRowTiles) {
            const int count = static_cast<int>(std::min<int64_t>(kRowTiles, rows.count - tile));
            tile_rows<V, Tiles, Q>(tiles, p.data + block * p.block_bytes, p.inputs / kGroup, o.acts, rows, tile, count,
                                   tile + count == rows.count ? p.block_bytes : 0, scratch);
            for (int i = 0; i < count; ++i) {
                float* out = o.out + rows.start(tile + i) * o.out_row;
                for (int r = 0; r < rows.height; ++r, out += o.out_row)
                    store_columns<V>(p, block, V::load(scratch.acc[i][r]), out);
            }
        }
}

// Kernels::product where there are tiles; few rows and unquantised kinds are left to the table of `rest`.
template <class V, class Tiles, const Kernels* (*rest)()>
void product_with_tiles(const Part& part, int64_t first, int64_t last, const Group* acts, const float* x, int64_t x_row,
                        int64_t rows, float* out, int64_t out_row) {
    const Operands o{part, acts, x, x_row, out, out_row};
    if (rows >= kFewestTileRows) switch (part.kind) {
            case Kind::Q4_0: return tile_product<V, Tiles, kQ4_0>(o, first, last, rows);
            case Kind::Q4_1: return tile_product<V, Tiles, kQ4_1>(o, first, last, rows);
            case Kind::Q5_0: return tile_product<V, Tiles, kQ5_0>(o, first, last, rows);
            case Kind::Q5_1: return tile_product<V, Tiles, kQ5_1>(o, first, last, rows);
            case Kind::Q8_0: return tile_product<V, Tiles, kQ8_0>(o, first, last, rows);
            case Kind::Q4_K: return tile_product<V, Tiles, kQ4_K>(o, first, last, rows);
            case Kind::Q5_K: return tile_product<V, Tiles, kQ5_K>(o, first, last, rows);
            case Kind::Q6_K: return tile_product<V, Tiles, kQ6_K>(o, first, last, rows);
            default: break;
        }
    rest()->product(part, first, last, acts, x, x_row, rows, out, out_row);
}

// The table of `rest`, but for products.
template <class V, class Tiles, const Kernels* (*rest)()>
Kernels table_with_tiles(const char* name) {
    Kernels kernels = *rest();
    kernels.name = name;
    kernels.product = product_with_tiles<V, Tiles, rest>;
    return kernels;
}

}  // namespace
}  // namespace obole

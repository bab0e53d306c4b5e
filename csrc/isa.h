// The one interface that every instruction set implements: a table of functions over raw memory.
//
// All of them compute the same bits, because all are instances of the same templates (kernel_*.h) over a small vector
// type of 16 lanes (simd_*.h). None of them allocates, throws or starts threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace obole {

// 32 quantised inputs of one row. `nsum` is minus the sum of the codes, `nhalf` minus the sums of its halves, `nweight` is
// `nsum` times the scale.
struct Group {
    int8_t code[kGroup];
    float scale, nweight;
    int32_t nsum;
    int32_t nhalf[2];
};
static_assert(sizeof(Group) == 52);

// One matrix of a product, packed. The stream of column block b starts at data + b * block_bytes.
struct Part {
    Kind kind;
    int64_t inputs;
    int64_t outputs;
    int64_t column;        // of its first output in the product's rows
    int64_t blocks;        // ceil(outputs / 16)
    int64_t block_bytes;
    const uint8_t* data;
    const float* bias;     // blocks * 16 values, or null
};

// How keys and values are stored. Eight bits: a code times its vector's scale, the vector being one token's key or value of
// one head; INT8 codes are signed integers from -127 to 127, FP8 ones are e4m3 (no infinities; 448 is the largest).
enum class KvFormat : int { F32, BF16, INT8, FP8 };

constexpr bool has_scales(KvFormat format) { return format == KvFormat::INT8 || format == KvFormat::FP8; }

// The keys and values of one layer.
struct KvPool {
    KvFormat format;
    void* k;               // [blocks][kv_heads][head_dim][16]
    void* v;               // [blocks][kv_heads][16][head_dim]
    float* scale_k;        // [blocks][kv_heads][16], null for formats without
    float* scale_v;
};

struct Attention {
    const float* q;        // [rows][heads][head_dim], strides in floats
    int64_t q_row, q_head;
    KvPool pool;
    const int32_t* table;  // [sequences][table_row] block ids
    int64_t table_row;
    const int32_t* row_starts;  // [sequences + 1]
    const int32_t* pos_starts;  // [sequences]
    int64_t sequences, heads, kv_heads, head_dim;
    float scale;
    int64_t window;        // positions a row sees, its own included
    float softcap;         // 0: none
    float* out;            // [rows][heads * head_dim]
};

constexpr int64_t kBlock = 16;     // positions in a block of the pool
constexpr int64_t kSegment = 256;  // positions in a segment: the unit of summation, at fixed places
constexpr int64_t kItems = 32;     // queries that share a segment while it is in cache: the most that a unit has

// The queries [first, first + items) of one sequence and one key/value head, counted as row * group + head of the group.
struct Unit {
    int64_t sequence, kv_head, first, items;
};

// Running softmax of one query: largest score, sum of weights, weighted values (head_dim, padded to 16).
constexpr int64_t state_floats(int64_t head_dim) { return 16 + (head_dim + 15) / 16 * 16; }

struct Kernels {
    const char* name;
    void (*quantize)(const float* x, int64_t inputs, Group* out);
    // Column blocks [first, last) of `part` for `rows` rows. Quantised kinds read `acts` (rows x inputs / 32 groups),
    // the others `x` (rows apart by x_row floats). out[row * out_row + column].
    void (*product)(const Part& part, int64_t first, int64_t last, const Group* acts, const float* x, int64_t x_row,
                    int64_t rows, float* out, int64_t out_row);
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
    void (*add)(float* x, const float* y, int64_t n);
    void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
    void (*gelu_tanh_mul)(const float* gate, const float* up, int64_t n, float* out);
    void (*rope)(float* x, const float* cos, const float* sin, int64_t half);
    int64_t (*argmax)(const float* x, int64_t n);
    float (*exp_sum)(const float* x, int64_t n, float top);
    // The noise of ids first, first + 1, ..., first + n - 1 where `ids` is null.
    void (*gumbel)(uint64_t seed, uint64_t position, const int64_t* ids, int64_t first, int64_t n, float* out);
    // Softmax of a unit's queries over one segment, each into states + i * state_floats(head_dim).
    void (*attend_segment)(const Attention& a, const Unit& unit, int64_t segment, float* states);
    void (*attend_merge)(float* state, const float* next, int64_t head_dim);
    void (*attend_finish)(const float* state, int64_t head_dim, float* out);
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512vnni();
const Kernels* kernels_amx();           // avx512vnni, with tiles for products of quantised weights
const Kernels* kernels_amx_emulated();  // portable, with the same tiles in plain C++: slow, for tests

// The table of that name, or null: unknown, or this machine cannot run it. "auto": the best it can run, never the emulated one.
const Kernels* find_kernels(const char* name);

}  // namespace obole

// Packing GGUF blocks into the tiled layout of formats.h, and reading single rows back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace obole {

// Zeroed memory, aligned for registers, or for huge pages where it is large.
using Buffer = std::unique_ptr<uint8_t[], void (*)(uint8_t*)>;
Buffer allocate(int64_t bytes);

// Matrices with the same inputs, whose outputs stand side by side in the rows of one product.
class Packed {
public:
    explicit Packed(int64_t inputs) : inputs_(inputs) {}
    Packed(const Packed&) = delete;
    Packed& operator=(const Packed&) = delete;

    // Room for one more matrix; `bias`: outputs floats, or null, which are copied. Its rows are zeros until they are filled in.
    void add(Kind kind, int64_t outputs, const float* bias);

    // Rows [first, first + count) of the last matrix, each of row_bytes as in a GGUF file, which are copied. `first` is a
    // multiple of 16, and so is `count` but at the end.
    void fill(Pool& pool, const uint8_t* rows, int64_t row_bytes, int64_t first, int64_t count);

    // Row `id` (an output, counted over all parts) as floats: exactly the values of the file, times `scale`.
    void dequantize(int64_t id, float scale, float* out) const;

    int64_t inputs() const { return inputs_; }
    int64_t outputs() const { return outputs_; }
    int64_t bytes() const { return bytes_; }
    const std::vector<Part>& parts() const { return parts_; }

private:
    int64_t inputs_, outputs_ = 0, bytes_ = 0;
    std::vector<Part> parts_;
    std::vector<Buffer> memory_;
    uint8_t* filled_ = nullptr;  // data of the last part
};

// Bytes of `inputs` weights in a file, or -1 where they do not fill whole blocks.
int64_t file_bytes(Kind kind, int64_t inputs);

}  // namespace obole

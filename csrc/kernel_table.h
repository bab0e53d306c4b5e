// The table of one instruction set.
#pragma once

#include "isa.h"
#include "kernel_attention.h"
#include "kernel_linear.h"
#include "kernel_rows.h"

namespace obole {
namespace {

template <class V>
constexpr Kernels table{V::name,     quantize<V>,      product<V>, rms_norm<V>, add<V>, silu_mul<V>,       gelu_tanh_mul<V>,
                        rope<V>,     argmax<V>,        exp_sum<V>, gumbel,     attend_segment<V>,   attend_merge<V>,   attend_finish<V>};

}  // namespace
}  // namespace obole

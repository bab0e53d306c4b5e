#include "kernel_table.h"
#include "simd_avx512.h"

namespace obole {

const Kernels* kernels_avx512vnni() { return &table<Avx512>; }

}  // namespace obole

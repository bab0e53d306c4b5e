#include "kernel_table.h"
#include "simd_avx2.h"

namespace obole {

const Kernels* kernels_avx2() { return &table<Avx2>; }

}  // namespace obole

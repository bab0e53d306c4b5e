#include "kernel_table.h"
#include "simd_portable.h"

namespace obole {

const Kernels* kernels_portable() { return &table<Portable>; }

}  // namespace obole

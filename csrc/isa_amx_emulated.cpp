#include "kernel_tiles.h"
#include "simd_portable.h"
#include "tiles_emulated.h"

namespace obole {

const Kernels* kernels_amx_emulated() {
    static const Kernels kernels = table_with_tiles<Portable, EmulatedTiles, kernels_portable>("amx-emulated");
    return &kernels;
}

}  // namespace obole

#include "kernel_tiles.h"
#include "simd_avx512.h"
#include "tiles_amx.h"

namespace obole {

const Kernels* kernels_amx() {
    static const Kernels kernels = table_with_tiles<Avx512, AmxTiles, kernels_avx512vnni>("amx");
    return &kernels;
}

}  // namespace obole

#include "isa.h"

#include <cstring>

#include "amx.h"

namespace obole {

namespace {

bool runs_avx2() {
#ifdef OBOLE_X86
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

bool runs_avx512vnni() {
#ifdef OBOLE_X86
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

}  // namespace

#ifndef OBOLE_X86
const Kernels* kernels_avx2() { return nullptr; }
const Kernels* kernels_avx512vnni() { return nullptr; }
const Kernels* kernels_amx() { return nullptr; }
#endif

const Kernels* find_kernels(const char* name) {
    const bool any = std::strcmp(name, "auto") == 0;
    if ((any || std::strcmp(name, "amx") == 0) && !amx_refusal()) return kernels_amx();
    if ((any || std::strcmp(name, "avx512vnni") == 0) && runs_avx512vnni()) return kernels_avx512vnni();
    if ((any || std::strcmp(name, "avx2") == 0) && runs_avx2()) return kernels_avx2();
    if (any || std::strcmp(name, "portable") == 0) return kernels_portable();
    if (std::strcmp(name, "amx-emulated") == 0) return kernels_amx_emulated();
    return nullptr;
}

}  // namespace obole

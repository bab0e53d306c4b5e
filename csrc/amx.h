// Whether AMX may be used here.
#pragma once

#include "isa.h"

namespace obole {

// Null if it may, else why not. Asked once; the first call asks the system to let this process use tile registers.
const char* amx_refusal();

// Whether two instruction sets compute the same bits in small products of every quantised kind.
bool same_products(const Kernels& a, const Kernels& b);

}  // namespace obole

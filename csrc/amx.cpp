#include "amx.h"

#include <cstring>
#include <vector>

#if defined(OBOLE_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace obole {

namespace {

class Random {  // numbers without order, the same each time (xorshift)
public:
    uint32_t operator()() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 17;
        return state_ ^= state_ << 5;
    }

private:
    uint32_t state_ = 1;
};

// Halves from 1/16 to 1/8 of either sign.
uint8_t* put_halves(Random& random, uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 2, p += 2) {
        const auto half = static_cast<uint16_t>(0x2c00 | (random() & 0x83ff));
        std::memcpy(p, &half, 2);
    }
    return p;
}

// A column block as in formats.h, with any codes.
void put_block(Random& random, Format format, int64_t inputs, uint8_t* p) {
    for (int64_t g = 0; g < inputs / kGroup; ++g) {
        if (format.is_k && g % format.tiles() == 0) p = put_halves(random, p, format.header_bytes());
        const uint8_t* end = p + format.tile_bytes();
        if (!format.is_k) p = put_halves(random, p, format.scale_bytes());
        while (p < end) *p++ = static_cast<uint8_t>(random() >> 24);
    }
}

std::vector<float> outputs_of(const Kernels& k, const Part& part, const std::vector<float>& x, int64_t rows) {
    const int64_t groups = part.inputs / kGroup, padded = rows + 3;  // a kernel may read so many more
    std::vector<Group> acts(static_cast<size_t>(padded * groups));
    for (int64_t r = 0; r < rows; ++r) k.quantize(x.data() + r * part.inputs, part.inputs, acts.data() + r * groups);
    std::vector<float> out(static_cast<size_t>(rows * part.outputs));
    k.product(part, 0, part.blocks, acts.data(), x.data(), part.inputs, rows, out.data(), part.outputs);
    return out;
}

#if defined(OBOLE_X86) && defined(__linux__)
bool processor_has_amx() {
    unsigned a, b, c, d;
    constexpr unsigned tile = 1u << 24, int8 = 1u << 25;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tile) && (d & int8);
}

// Linux saves tile registers only for processes that have asked for it, from version 5.16 on.
bool system_grants_tiles() {
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

const char* find_refusal() {
    if (!processor_has_amx()) return "the processor has no AMX-INT8";
    const Kernels* plain = find_kernels("avx512vnni");
    if (!plain) return "the processor has no AVX-512 VNNI";
    if (!system_grants_tiles()) return "the system does not grant the use of tile registers";
    if (!same_products(*kernels_amx(), *plain)) return "its products differ from those of avx512vnni";
    return nullptr;
}
#else
const char* find_refusal() { return "there is no AMX on this kind of machine"; }
#endif

}  // namespace

const char* amx_refusal() {
    static const char* const refusal = find_refusal();
    return refusal;
}

bool same_products(const Kernels& a, const Kernels& b) {
    Random random;
    for (const Kind kind : {Kind::Q4_0, Kind::Q4_1, Kind::Q5_0, Kind::Q5_1, Kind::Q8_0, Kind::Q4_K, Kind::Q5_K, Kind::Q6_K}) {
        const Format format = format_of(kind);
        // Two column blocks, the second not full; groups that make no whole number of steps, where a kind allows it.
        const int64_t inputs = format.is_k ? 512 : 15 * kGroup, outputs = 23, blocks = 2;
        const int64_t block_bytes = stream_bytes(kind, inputs);
        std::vector<uint8_t> data(static_cast<size_t>(blocks * block_bytes));
        for (int64_t i = 0; i < blocks; ++i) put_block(random, format, inputs, data.data() + i * block_bytes);
        const Part part{kind, inputs, outputs, 0, blocks, block_bytes, data.data(), nullptr};
        for (const int64_t rows : {7, 16, 35}) {
            std::vector<float> x(static_cast<size_t>(rows * inputs));
            for (float& value : x) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
            const auto first = outputs_of(a, part, x, rows), second = outputs_of(b, part, x, rows);
            if (std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) != 0) return false;
        }
    }
    return true;
}

}  // namespace obole

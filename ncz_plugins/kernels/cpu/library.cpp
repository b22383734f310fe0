// What the library says about itself and about the processor it runs on.

#include "../common/format.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

NCZ_EXPORT int32_t ncz_abi_version() { return ncz::ABI_VERSION; }

// Why the AVX2 functions must not be called here, or null.
NCZ_EXPORT const char* ncz_avx2_missing() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return "this CPU lacks AVX2";
    if (!__builtin_cpu_supports("bmi")) return "this CPU lacks BMI1";
    if (!__builtin_cpu_supports("bmi2")) return "this CPU lacks BMI2";
    unsigned a, b, c, d;  // clang's __builtin_cpu_supports does not know F16C
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return "this CPU lacks F16C";
    // To others its instruction is another one, which gives other numbers.
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !(c & bit_LZCNT)) return "this CPU lacks LZCNT";
    if (__builtin_cpu_is("amdfam15h") || __builtin_cpu_is("amdfam17h"))
        return "this AMD CPU (before Zen 3) has pext and pdep in microcode, which is slower than the portable kernels";
    return nullptr;
#else
    return "the library was built for another architecture than x86-64";
#endif
}

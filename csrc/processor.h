// Whether this processor has an instruction set.
#pragma once

static inline bool always() { return true; }

#if defined(__x86_64__)
static inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
static inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static inline bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
static inline bool has_avx512bf16() {
#if defined(SP_BF16_MODEL)
  return has_avx512vnni();
#elif defined(SP_KNOWS_AVX512BF16)  // the compiler
  return has_avx512vnni() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}
#endif

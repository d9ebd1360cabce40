// Whether this processor has an instruction set. With SP_MODELS, some sets need fewer instructions: see CMakeLists.txt.
#pragma once

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

static inline bool always() { return true; }

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(SP_MODELS)
constexpr bool MODELLED = true;
#else
constexpr bool MODELLED = false;
#endif

// A bit of EAX in CPUID's leaf 7, subleaf 1: compilers need not know the instruction's name.
static inline bool has_bit(int bit) {
  unsigned a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> bit & 1;
}

static inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
static inline bool has_avxvnni() { return has_avx2() && (MODELLED || has_bit(4)); }
static inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
static inline bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
static inline bool has_avx512bf16() { return has_avx512vnni() && (MODELLED || has_bit(5)); }

// Whether the system lets this process use tiles. It has to be asked: the processor's flags say nothing of a container that refuses.
static inline bool has_amx() {
#if defined(SP_MODELS)
  return has_avx2();
#elif defined(__linux__)
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  constexpr unsigned BFLOAT16 = 1u << 22, TILES = 1u << 24, INT8 = 1u << 25, ALL = BFLOAT16 | TILES | INT8;
  unsigned a, b, c, d = 0;
  return has_avx512vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & ALL) == ALL && !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
#if defined(__APPLE__)
static inline bool has_feature(const char *name) {
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has;
}
static inline bool has_neon() { return true; }
static inline bool has_neondot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static inline bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else  // bits as Linux gives them: older headers have no names for them
static inline bool has_neon() { return getauxval(AT_HWCAP) >> 1 & 1; }
static inline bool has_neondot() { return has_neon() && getauxval(AT_HWCAP) >> 20 & 1; }
static inline bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }
#endif
static inline bool has_neoni8mm() {
#if defined(SP_KNOWS_NEONI8MM)  // the compiler
  return has_neondot() && has_i8mm();
#else
  return false;
#endif
}
#endif

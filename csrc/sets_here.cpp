// Prints the instruction sets that this processor has: those that are used by default, the best first, then the others.
#include <stdio.h>

#include "processor.h"

static void put(const char *name, bool (*usable)()) {
  if (usable()) puts(name);
}

int main() {
#if defined(__x86_64__)
  put("avx512bf16", has_avx512bf16), put("avx512vnni", has_avx512vnni), put("avx512", has_avx512), put("avx2", has_avx2);
#elif defined(__aarch64__)
  put("neoni8mm", has_neoni8mm), put("neondot", has_neondot), put("neon", has_neon);
#endif
  put("portable", always);
#if defined(__x86_64__)
  put("amx", has_amx), put("avxvnni", has_avxvnni);
#endif
}

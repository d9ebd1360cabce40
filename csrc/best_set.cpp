// Prints this processor's best instruction set, for builds that have no other.
#include <stdio.h>

#include "processor.h"

int main() {
#if defined(__x86_64__)
  puts(has_avx512bf16() ? "avx512bf16" : has_avx512vnni() ? "avx512vnni" : has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable");
#elif defined(__aarch64__)
  puts(has_neoni8mm() ? "neoni8mm" : has_neondot() ? "neondot" : has_neon() ? "neon" : "portable");
#else
  puts("portable");
#endif
}

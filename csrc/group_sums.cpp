// Sums of linear layers over weights in groups of integers: see SpSums.
#include "integers.h"

namespace SP_NAMESPACE {

// In byte_sums.cpp, so that two processors compile the sums.
extern template void sum_groups<SP_INT8>(const char *, const Rows &, int64_t, float *);
extern template void sum_groups<SP_Q8_0>(const char *, const Rows &, int64_t, float *);
extern template void sum_groups<SP_Q6_K>(const char *, const Rows &, int64_t, float *);
extern template void sum_groups<SP_IQ4_NL>(const char *, const Rows &, int64_t, float *);
extern template void sum_groups<SP_ZERO8>(const char *, const Rows &, int64_t, float *);

extern const SpSum GROUPS[] = {sum_groups<SP_INT8>, sum_groups<SP_Q8_0>,   sum_groups<SP_Q4_0>,  sum_groups<SP_Q4_1>,  sum_groups<SP_Q5_0>,
                               sum_groups<SP_Q5_1>, sum_groups<SP_Q4_K>,   sum_groups<SP_Q5_K>,  sum_groups<SP_Q6_K>,  sum_groups<SP_IQ4_NL>,
                               sum_groups<SP_MXFP4>, sum_groups<SP_ZERO4>, sum_groups<SP_ZERO8>};

}  // namespace SP_NAMESPACE

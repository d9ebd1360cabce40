// Sums of linear layers over weights in groups of integers of 6 or 8 bits: see group_sums.cpp.
#include "integers.h"

namespace SP_NAMESPACE {

template void sum_groups<SP_INT8>(const char *, const Rows &, int64_t, float *);
template void sum_groups<SP_Q8_0>(const char *, const Rows &, int64_t, float *);
template void sum_groups<SP_Q6_K>(const char *, const Rows &, int64_t, float *);
template void sum_groups<SP_IQ4_NL>(const char *, const Rows &, int64_t, float *);
template void sum_groups<SP_ZERO8>(const char *, const Rows &, int64_t, float *);

}  // namespace SP_NAMESPACE

// One instruction set's kernels: included once by each isa_*.cpp, which names SP_NAMESPACE and the tables, and sets the compiler's flags.
#pragma once
#include "attention.h"
#include "checksum.h"
#include "program.h"

#if !defined(SP_BF16_PAIRS)
using namespace SP_NAMESPACE;
extern const SpSum SP_GROUP_SUMS[] = {sum_groups<SP_INT8>, sum_groups<SP_Q8_0>, sum_groups<SP_Q4_0>, sum_groups<SP_Q4_1>, sum_groups<SP_Q5_0>,
                                      sum_groups<SP_Q5_1>, sum_groups<SP_Q4_K>, sum_groups<SP_Q5_K>, sum_groups<SP_Q6_K>, sum_groups<SP_IQ4_NL>,
                                      sum_groups<SP_MXFP4>, sum_groups<SP_ZERO4>, sum_groups<SP_ZERO8>};
#endif

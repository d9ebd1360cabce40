// One instruction set's kernels: included once by each isa_*.cpp, which names SP_NAMESPACE and the tables, and sets the compiler's flags.
#pragma once
#include "attention.h"
#include "checksum.h"
#include "program.h"

#if !defined(SP_BF16_PAIRS)
using namespace SP_NAMESPACE;
extern const SpSum *const SP_GROUP_SUMS[] = {SUM_GROUPS<SP_INT8>, SUM_GROUPS<SP_Q8_0>, SUM_GROUPS<SP_Q4_0>,   SUM_GROUPS<SP_Q4_1>,
                                             SUM_GROUPS<SP_Q5_0>, SUM_GROUPS<SP_Q5_1>, SUM_GROUPS<SP_Q4_K>,   SUM_GROUPS<SP_Q5_K>,
                                             SUM_GROUPS<SP_Q6_K>, SUM_GROUPS<SP_IQ4_NL>, SUM_GROUPS<SP_MXFP4>, SUM_GROUPS<SP_ZERO4>,
                                             SUM_GROUPS<SP_ZERO8>};
#endif

// Sums of linear layers over weights that are floats: see SpSums.
#include "fp8.h"
#if defined(SP_AMX)
#include "pair_tiles.h"
#endif

namespace SP_NAMESPACE {

#if defined(SP_AMX)
extern const SpSum FLOATS[] = {sum_bf16_tiles, sum_bf12_tiles};
#elif defined(SP_BF16_PAIRS)
extern const SpSum FLOATS[] = {sum_reals<SP_BF16>, sum_coded};
#else
extern const SpSum FLOATS[] = {sum_reals<SP_F32>, sum_reals<SP_BF16>, sum_reals<SP_F16>, sum_coded, sum_fp8};
#endif

}  // namespace SP_NAMESPACE

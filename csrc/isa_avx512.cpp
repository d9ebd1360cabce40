#define SP_AVX512
#define SP_NAMESPACE avx512
#define SP_TABLE_NAME sp_table_avx512
#define SP_GROUP_SUMS sp_group_sums_avx512
#include "isa.h"

#define SP_AVX2
#define SP_NAMESPACE avx2
#define SP_TABLE_NAME sp_table_avx2
#define SP_GROUP_SUMS sp_group_sums_avx2
#include "isa.h"

#define SP_AVX512
#define SP_VNNI
#define SP_NAMESPACE avx512vnni
#define SP_TABLE_NAME sp_table_avx512vnni
#define SP_GROUP_SUMS sp_group_sums_avx512vnni
#include "isa.h"

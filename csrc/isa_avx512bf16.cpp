#define SP_AVX512
#define SP_VNNI
#define SP_BF16_PAIRS
#define SP_NAMESPACE avx512bf16
#define SP_TABLE_NAME sp_table_avx512bf16
#include "isa.h"

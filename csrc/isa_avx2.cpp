#define SP_AVX2
#define SP_NAMESPACE avx2
#define SP_TABLE_NAME sp_table_avx2
#include "isa.h"

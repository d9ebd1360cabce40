#define SP_PORTABLE
#define SP_NAMESPACE portable
#define SP_TABLE_NAME sp_table_portable
#define SP_GROUP_SUMS sp_group_sums_portable
#include "isa.h"

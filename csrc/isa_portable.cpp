#define SP_PORTABLE
#define SP_NAMESPACE portable
#define SP_TABLE_NAME sp_table_portable
#include "isa.h"

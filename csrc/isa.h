// One instruction set's kernels: included once by each isa_*.cpp, which names SP_NAMESPACE and sets the compiler's flags.
#pragma once
#include "attention.h"
#include "checksum.h"
#include "program.h"

// All kernels but the sums of linear layers, for vectors of one width.
#include "attention.h"
#include "checksum.h"
#include "program.h"

namespace SP_NAMESPACE {

extern const SpTable TABLE = {check,        run,   pack,  round_rows,   decode_rows, packed_bytes, index_panels, code_panels, touch,
                              draft_tokens, probs, draw,  draw_rows,    normalise_weights, read_all, checksum,   stage_items};

}  // namespace SP_NAMESPACE

// Packs weights for the kernels, once, when a model is loaded.
#pragma once
#include "blocks.h"
#include "rounding.h"

namespace SP_NAMESPACE {

static int64_t packed_bytes(int type, int64_t n, int64_t k) { return panels_of(n) * bytes_of_panel(type, k); }

static void pack_any(int type, int source, const void *weight, int64_t n, int64_t k, int64_t panel, char *packed) {
  if (type == SP_FP8)
    pack_fp8(weight, n, k, panel, packed);
  else if (source == SP_INT8)
    pack_int8_rows(weight, n, k, panel, packed);
  else if (is_grouped(source))
    pack_any_blocks(type, weight, n, k, panel, packed);
  else
    pack_panel(type, source, weight, n, k, panel, packed);
}

static void pack(int type, int source, const void *weight, int64_t n, int64_t k, int64_t step, void *packed, int threads) {
  const int64_t bytes = bytes_of_panel(type, k) * step;
  share_out(panels_of(n), threads, [&](int64_t panel) {
    pack_any(type, source, weight, n, k, panel, (char *)packed + panel * bytes);
  });
}

constexpr uintptr_t HUGE_PAGE = 1 << 21, PAGE = 1 << 12;  // bytes

// Get the pages of new memory from the system, which clears them when they are first written to. Threads take whole huge pages: if two
// write to one at the same time, both clear it.
static void touch(void *memory, int64_t bytes, int threads) {
  const uintptr_t begin = (uintptr_t)memory, end = begin + bytes, first = begin / HUGE_PAGE;
  share_out(bytes ? (end - 1) / HUGE_PAGE - first + 1 : 0, threads, [&](int64_t piece) {
    const uintptr_t from = (first + piece) * HUGE_PAGE, to = from + HUGE_PAGE < end ? from + HUGE_PAGE : end;
    for (uintptr_t at = from < begin ? begin : from; at < to; at = (at / PAGE + 1) * PAGE) *(volatile char *)at = 0;
  });
}

}  // namespace SP_NAMESPACE

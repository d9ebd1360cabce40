// bfloat16 weights in 12 bits each: the same numbers in three quarters of the bytes, which are read in less time.
//
// A weight's low byte (the exponent's last bit and the mantissa) is stored as it is. High bytes (the sign and the rest of the exponent)
// have few values in a trained matrix. A panel has a table of its fifteen commonest ones, and a weight has an index of four bits into
// it. Other high bytes are escapes, in a list in the order of the panel.
//
//   index     an entry for each panel: where it is, and its table
//   panel     blocks of BLOCK_STEPS steps of a plain panel, in streams like its steps (linear.h); a panel with many escapes is stored
//             plain
//   block     [LOW_BYTES] low bytes, [INDEX_BYTES] pairs of indices: byte b's in the low half, byte b + INDEX_BYTES's in the high half
//   escapes   a dword each: the weight's place in a plain panel without streams, and the high byte in the last 8 bits; then END
//
// A block is decoded into plain steps, which are multiplied like plain weights, with the same bits. The steps stay in registers if the
// rows are few and the block has no escape; else they go to the first-level cache, where escapes are filled in, and all tiles of a work
// item are multiplied by them.
#pragma once
#include "linear.h"

namespace SP_NAMESPACE {

constexpr int64_t VECTOR = LANES * 4;                     // bytes
constexpr int64_t STEP_WEIGHTS = WIDTH * 2;
constexpr int64_t BLOCK_STEPS = 64 / LANES;
constexpr int64_t LOW_BYTES = BLOCK_STEPS * STEP_WEIGHTS, INDEX_BYTES = LOW_BYTES / 2, BLOCK = LOW_BYTES + INDEX_BYTES;
constexpr int64_t PAIRS = LOW_BYTES / VECTOR;             // of decoded vectors: one vector of low bytes makes two
constexpr int64_t BLOCK_STREAMS = 4, BLOCKS_AHEAD = 4;    // to prefetch in each stream, into the second cache
constexpr int COMMON = 15;                                // entries of a table; the index after them is an escape's
constexpr uint32_t END = 0xffffffff;
constexpr int64_t MOST_WEIGHTS = (1 << 24) - LOW_BYTES;   // of a panel: a place has 24 bits
constexpr int64_t LEAST_PER_ESCAPE = 128;                 // weights: a panel with more escapes is stored plain
constexpr int64_t SAMPLED = 8, LEAST_SAMPLED = 512;       // steps: from LEAST_SAMPLED on, a table is chosen from one in SAMPLED

struct CodedPanel {
  int64_t data, escapes;  // bytes from this entry to the panel, and to its escapes; escapes 0 = the panel is plain
  uint8_t table[16];

  const char *at(int64_t offset) const { return (const char *)this + offset; }
  const uint32_t *first_escape() const { return (const uint32_t *)at(escapes); }
};
static_assert(sizeof(CodedPanel) == SP_INDEX_BYTES, "the size that callers are told");

static inline Steps blocks_of(int64_t k) {
  return Steps((steps_of(SP_BF16, k).count + BLOCK_STEPS - 1) / BLOCK_STEPS, BLOCK, BLOCK_STREAMS);
}

// The place of weight e's low byte in a block. Decoding zips 8 low and 8 high bytes of each 16 bytes of a vector into a decoded vector.
static inline int64_t low_place(int64_t e) {
  const int64_t vector = e / (VECTOR / 2), i = e % (VECTOR / 2);
  return vector / 2 * VECTOR + i / 8 * 16 + vector % 2 * 8 + i % 8;
}
static inline int64_t index_place(int64_t low) { return LOW_BYTES + low % INDEX_BYTES; }
static inline int index_shift(int64_t low) { return low < INDEX_BYTES ? 0 : 4; }

struct Pair {
  Ints first, second;
};

// Decode vectors 2p and 2p + 1 of a block's plain steps, without escapes.
static inline __attribute__((always_inline)) Pair decode_pair(const char *block, int64_t p, Ints table) {
  const Ints indices = load_ints(block + LOW_BYTES + p % (PAIRS / 2) * VECTOR), low = load_ints(block + p * VECTOR);
  const Ints high = look_up(table, p < PAIRS / 2 ? low_halves(indices) : high_halves(indices));
  return {zip_low(low, high), zip_high(low, high)};
}

static inline bool has_escape(const uint32_t *next, int64_t b) { return *next >> 8 < (b + 1) * LOW_BYTES; }

// Decode a block into plain steps. `next` is the block's first escape; afterwards it is the first of the following blocks.
static inline __attribute__((always_inline)) void decode_block(const char *block, int64_t b, Ints table, const uint32_t *&next, char *steps) {
  for (int64_t p = 0; p < PAIRS; p++) {
    const Pair pair = decode_pair(block, p, table);
    store_ints(steps + 2 * p * VECTOR, pair.first), store_ints(steps + (2 * p + 1) * VECTOR, pair.second);
  }
  for (; has_escape(next, b); next++) steps[2 * ((*next >> 8) - b * LOW_BYTES) + 1] = (char)*next;
}

// Call work(b, block b) for the blocks of one round of the streams, which begins with block `first`.
template <typename Work>
static inline __attribute__((always_inline)) void each_of_round(const CodedPanel &coded, const Steps &blocks, int64_t first, Work work) {
  const int64_t end = first + BLOCK_STREAMS < blocks.count ? first + BLOCK_STREAMS : blocks.count;
  const char *block = coded.at(coded.data) + blocks.at(first);
  for (int64_t b = first; b < end; b++, block += blocks.stride) {
    for (int64_t i = 0; i < BLOCK; i += 64) prefetch_far(block + BLOCKS_AHEAD * BLOCK + i);
    work(b, block);
  }
}

// Whether two decoded steps fit in the registers beside the accumulators.
static constexpr bool fits(int rows) { return (rows + 2) * VECS + 4 <= REGISTERS; }

// Decode a block without escapes and multiply it, two steps at a time.
template <int ROWS>
static inline __attribute__((always_inline)) void add_block(const char *block, int64_t j, Ints table, const void *x, Vec acc[ROWS][VECS]) {
#pragma GCC unroll 8
  for (int64_t s = 0; s < BLOCK_STEPS; s += 2) {
    Ints w[2 * VECS];
    for (int v = 0; v < VECS; v++) {
      const Pair pair = decode_pair(block, s / 2 * VECS + v, table);
      w[2 * v] = pair.first, w[2 * v + 1] = pair.second;
    }
    add_pair_step<ROWS>(w, x, j + s, acc);
    add_pair_step<ROWS>(w + VECS, x, j + s + 1, acc);
  }
}

// A single tile of few rows.
template <int ROWS>
static void sum_coded_tile(const CodedPanel &coded, const void *x, int64_t k, float *sums) {
  alignas(64) char steps[2 * LOW_BYTES];
  Vec acc[ROWS][VECS];
  clear<ROWS>(acc);
  const Ints table = load_table(coded.table);
  const uint32_t *next = coded.first_escape();
  const int64_t whole = whole_steps(k);
  const Steps blocks = blocks_of(k);
  for (int64_t round = 0; round < blocks.count; round += BLOCK_STREAMS)
    each_of_round(coded, blocks, round, [&](int64_t b, const char *block) __attribute__((always_inline)) {
      const int64_t first = b * BLOCK_STEPS;
      const bool complete = first + BLOCK_STEPS <= whole;
      if (fits(ROWS) && complete && !has_escape(next, b)) return add_block<ROWS>(block, first, table, x, acc);
      decode_block(block, b, table, next, steps);
      if (complete) {
#pragma GCC unroll 8
        for (int64_t s = 0; s < BLOCK_STEPS; s++) add_bf16_step<ROWS>(steps + s * STEP, x, first + s, acc);
      } else {
        for (int64_t j = first; j < whole; j++) add_bf16_step<ROWS>(steps + (j - first) * STEP, x, j, acc);
        add_half_step<ROWS>(steps + (whole - first) * STEP, x, k, acc);
      }
    });
  put_acc<ROWS>(acc, sums);
}

typedef void SumCodedTile(const CodedPanel &coded, const void *x, int64_t k, float *sums);
static constexpr SumCodedTile *SUM_CODED_TILE[] = {nullptr, sum_coded_tile<1>, sum_coded_tile<2>, sum_coded_tile<3>, sum_coded_tile<4>,
#if defined(SP_AVX512)
                                                   sum_coded_tile<5>, sum_coded_tile<6>, sum_coded_tile<7>, sum_coded_tile<8>,
#endif
};

constexpr int64_t PART_STEPS = 1024 / LANES;  // 12 KB: they stay in the first-level cache while several tiles are multiplied by them

// Several tiles: each part of the panel is decoded once for all.
static void sum_coded_tiles(const CodedPanel &coded, const Rows &rows, int64_t k, float *sums) {
  constexpr int64_t PART_BLOCKS = PART_STEPS / BLOCK_STEPS;
  alignas(64) char plain[PART_STEPS * STEP];
  const Ints table = load_table(coded.table);
  const uint32_t *next = coded.first_escape();
  const int64_t whole = whole_steps(k);
  const Steps blocks = blocks_of(k), steps = steps_of(SP_BF16, k).in_order();
  for (int64_t begin = 0; begin < blocks.count; begin += PART_BLOCKS) {
    for (int64_t round = begin; round < begin + PART_BLOCKS && round < blocks.count; round += BLOCK_STREAMS)
      each_of_round(coded, blocks, round, [&](int64_t b, const char *block) __attribute__((always_inline)) {
        decode_block(block, b, table, next, plain + (b - begin) * 2 * LOW_BYTES);
      });
    const int64_t first = begin * BLOCK_STEPS, some = whole - first < PART_STEPS ? whole - first : PART_STEPS;
    const bool has_rest = whole < steps.count && whole < first + PART_STEPS;
    const Part part = {plain, has_rest ? plain + some * STEP : nullptr, steps, first, some, k};
    each_tile(rows, ROUNDS ? (k + 1) / 2 : k, [&](int64_t count, const void *x, int64_t row) {
      ADD_PART<SP_BF16>[count](part, x, sums + row * WIDTH);
    });
  }
}

// sums[rows][WIDTH] of one panel and some rows, over k inputs.
static void sum_coded(const char *entry, const Rows &rows, int64_t k, float *sums) {
  const CodedPanel &coded = *(const CodedPanel *)entry;
  if (!coded.escapes) return sum_reals<SP_BF16>(coded.at(coded.data), rows, k, sums);
  if (rows.rows > MOST_ROWS) return sum_coded_tiles(coded, rows, k, sums);
  SUM_CODED_TILE[rows.rows](coded, rows.dwords, k, sums);
}

// Read output i of a panel: its first `width` weights along k.
static void read_coded_row(const CodedPanel &coded, int64_t i, int64_t width, float *out) {
  const Steps blocks = blocks_of(width);
  for (int64_t j = 0; j < width; j++) {
    const uint8_t *block = (const uint8_t *)coded.at(coded.data) + blocks.at(j / 2 / BLOCK_STEPS);
    const int64_t low = low_place(j / 2 % BLOCK_STEPS * STEP_WEIGHTS + 2 * i + j % 2);
    const int high = coded.table[block[index_place(low)] >> index_shift(low) & 15];
    out[j] = read_bf16((uint16_t)(high << 8 | block[low]));
  }
  for (const uint32_t *escape = coded.first_escape(); *escape != END; escape++) {
    const int64_t place = *escape >> 8, j = place / STEP_WEIGHTS * 2 + place % 2;
    if (place % STEP_WEIGHTS / 2 != i || j >= width) continue;
    const uint8_t *block = (const uint8_t *)coded.at(coded.data) + blocks.at(place / LOW_BYTES);
    out[j] = read_bf16((uint16_t)((*escape & 255) << 8 | block[low_place(place % LOW_BYTES)]));
  }
}

// Fill a table with the commonest high bytes of a plain panel. For a large panel they are estimated from one step in SAMPLED.
static void choose_common(const char *plain, int64_t k, uint8_t *table) {
  const Steps steps = steps_of(SP_BF16, k);
  const int64_t apart = steps.count < LEAST_SAMPLED ? 1 : SAMPLED;
  int64_t counts[4][256] = {{0}};  // four, so that equal bytes in succession do not wait for one counter
  for (int64_t j = 0; j < steps.count; j += apart) {
    const uint8_t *bytes = (const uint8_t *)plain + steps.at(j);
    for (int64_t i = 0; i < STEP_WEIGHTS; i++) counts[i % 4][bytes[2 * i + 1]]++;
  }
  for (int high = 0; high < 256; high++) counts[0][high] += counts[1][high] + counts[2][high] + counts[3][high];
  for (int i = 0; i < COMMON; i++) {
    int best = 0;
    for (int high = 1; high < 256; high++)
      if (counts[0][high] > counts[0][best]) best = high;
    table[i] = (uint8_t)best, counts[0][best] = 0;
  }
  table[COMMON] = 0;
}

// Finds the index of each high byte, of the first entry with its value; COMMON = an escape.
#if defined(SP_PORTABLE)
struct Codes {
  uint8_t first, indices[256];

  explicit Codes(const uint8_t *table) : first(table[0]) {
    memset(indices, COMMON, sizeof indices);
    for (int t = COMMON - 1; t >= 0; t--) indices[table[t]] = (uint8_t)t;
  }
  inline Ints of(Ints highs) const { return map_bytes(highs, indices); }
};
#else
// A byte's slot has the possible values of the byte and their indices. Common exponents follow one another, so a slot has one or two.
struct Codes {
  uint8_t first;
  int most = 0;  // values in a slot
  alignas(16) uint8_t values[COMMON][16], indices[COMMON][16];

  explicit Codes(const uint8_t *table) : first(table[0]) {
    int counts[16] = {0};
    memset(indices, COMMON, sizeof indices);
    for (int way = 0; way < COMMON; way++)
      for (int slot = 0; slot < 16; slot++) values[way][slot] = (uint8_t)(slot + 1);  // a byte of another slot
    for (int t = 0; t < COMMON; t++) {
      if (memchr(table, table[t], t)) continue;
      const int slot = (table[t] & 7) | (table[t] >> 4 & 8), way = counts[slot]++;
      values[way][slot] = table[t], indices[way][slot] = (uint8_t)t;
      if (way == most) most++;
    }
  }
  inline __attribute__((always_inline)) Ints of(Ints highs) const {
    const Ints slots = slots_of(highs);
    Ints found = splat_byte(COMMON);
    for (int way = 0; way < most; way++)
      found = pick_equal(found, look_up(load_table(values[way]), slots), highs, look_up(load_table(indices[way]), slots));
    return found;
  }
};
#endif

// Call work(b, the plain steps of block b) for all blocks of a plain panel, in order.
template <typename Work>
static inline __attribute__((always_inline)) void each_plain_block(const char *plain, int64_t k, uint8_t padding, Work work) {
  const Steps steps = steps_of(SP_BF16, k), blocks = blocks_of(k);
  uint8_t weights[2 * LOW_BYTES];
  for (int64_t b = 0; b < blocks.count; b++) {
    const int64_t first = b * BLOCK_STEPS, some = steps.count - first < BLOCK_STEPS ? steps.count - first : BLOCK_STEPS;
    for (int64_t s = 0; s < some; s++) memcpy(weights + s * STEP, plain + steps.at(first + s), STEP);
    for (int64_t e = some * STEP_WEIGHTS; e < LOW_BYTES; e++) weights[2 * e] = 0, weights[2 * e + 1] = padding;
    work(b, weights);
  }
}

static int64_t count_escapes(const char *plain, int64_t k, const uint8_t *table) {
  const Codes codes(table);
  int64_t escapes = 0;
  each_plain_block(plain, k, table[0], [&](int64_t, const uint8_t *weights) __attribute__((always_inline)) {
    for (int64_t p = 0; p < PAIRS; p++) {
      const char *pair = (const char *)weights + 2 * p * VECTOR;
      const Ints indices = codes.of(unzip_second(load_ints(pair), load_ints(pair + VECTOR)));
      escapes += count_equal(indices, splat_byte(COMMON));
    }
  });
  return escapes;
}

// Fill an entry of the index, except for its offsets. Returns the panel's bytes; escapes = 1 unless it stays plain.
static int64_t measure_panel(const char *plain, int64_t k, CodedPanel &entry) {
  const int64_t weights = steps_of(SP_BF16, k).count * STEP_WEIGHTS, own = panel_bytes(SP_BF16, k);
  choose_common(plain, k, entry.table);
  const int64_t escapes = count_escapes(plain, k, entry.table), bytes = blocks_of(k).size() + whole_lines(4 * (escapes + 1));
  entry.escapes = bytes < own && escapes * LEAST_PER_ESCAPE <= weights && weights <= MOST_WEIGHTS;
  return entry.escapes ? bytes : whole_lines(own);
}

// Make the index of some plain panels. data: bytes from their first entry to the place of the first panel. Returns the bytes to the end
// of the last one.
static int64_t index_panels(int64_t panels, int64_t k, const void *plain, void *index, int64_t data, int threads) {
  CodedPanel *entries = (CodedPanel *)index;
  share_out(panels, threads, [&](int64_t p) {
    entries[p].data = measure_panel((const char *)plain + p * panel_bytes(SP_BF16, k), k, entries[p]);
  });
  for (int64_t p = 0; p < panels; p++) {
    const int64_t own = entries[p].data;
    entries[p].data = data - p * (int64_t)sizeof(CodedPanel);
    if (entries[p].escapes) entries[p].escapes = entries[p].data + blocks_of(k).size();
    data += own;
  }
  return data;
}

// Code LOW_BYTES weights. Returns whether there are escapes among them; `indices` are in the order of the low bytes.
static inline __attribute__((always_inline)) bool code_block(const uint8_t *weights, const Codes &codes, uint8_t *block, uint8_t *indices) {
  int escaped = 0;
  for (int64_t p = 0; p < PAIRS; p++) {
    const char *pair = (const char *)weights + 2 * p * VECTOR;
    const Ints first = load_ints(pair), second = load_ints(pair + VECTOR), found = codes.of(unzip_second(first, second));
    store_ints(block + p * VECTOR, unzip_first(first, second)), store_ints(indices + p * VECTOR, found);
    escaped += count_equal(found, splat_byte(COMMON));
  }
  for (int64_t i = 0; i < INDEX_BYTES; i++) block[LOW_BYTES + i] = (uint8_t)(indices[i] | indices[INDEX_BYTES + i] << 4);
  return escaped;
}

static void code_panel(const char *plain, int64_t k, CodedPanel &entry) {
  const Steps blocks = blocks_of(k);
  const Codes codes(entry.table);
  uint8_t indices[LOW_BYTES], *data = (uint8_t *)&entry + entry.data;
  uint32_t *escape = (uint32_t *)((char *)&entry + entry.escapes);
  blocks.clear_padding((char *)data);
  each_plain_block(plain, k, codes.first, [&](int64_t b, const uint8_t *weights) __attribute__((always_inline)) {
    if (!code_block(weights, codes, data + blocks.at(b), indices)) return;
    for (int64_t first = 0; first < LOW_BYTES; first += VECTOR) {
      if (!count_equal(load_ints(indices + first), splat_byte(COMMON))) continue;
      for (int64_t e = first; e < first + VECTOR; e++)
        if (indices[low_place(e)] == COMMON) *escape++ = (uint32_t)(b * LOW_BYTES + e) << 8 | weights[2 * e + 1];
    }
  });
  *escape = END;
}

// Code plain panels to the places in their index entries.
static void code_panels(int64_t panels, int64_t k, const void *plain, void *index, int threads) {
  CodedPanel *entries = (CodedPanel *)index;
  share_out(panels, threads, [&](int64_t p) {
    const char *panel = (const char *)plain + p * panel_bytes(SP_BF16, k);
    if (entries[p].escapes)
      code_panel(panel, k, entries[p]);
    else
      memcpy((char *)(entries + p) + entries[p].data, panel, panel_bytes(SP_BF16, k));
  });
}

}  // namespace SP_NAMESPACE

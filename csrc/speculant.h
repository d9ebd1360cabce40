/* The native kernels' interface: plain C, raw pointers, no ownership. Written for Python's ctypes.
 *
 * A *program* is a list of operations over fixed buffers, recorded once for a model. A *pass* says what it is run on:
 * so many rows of so many sequences, and where their keys and values are. One call runs a whole forward pass.
 *
 * Every row's result depends on that row (and the keys it sees) alone, bit for bit: sums run in one fixed order, tiles of
 * keys begin at absolute positions, and how the work is cut among threads or rows never shows.
 *
 * All activations are float32. They are multiplied as such, with two exceptions: int8 and int4 weights meet rows in int8, and on
 * the set avx512bf16 bfloat16 weights meet rows that were rounded to bfloat16, as its instruction multiplies nothing else.
 * T = rows of the pass.
 */
#ifndef SPECULANT_H
#define SPECULANT_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum SpType { SP_F32 = 0, SP_BF16 = 1, SP_INT8 = 2, SP_INT4 = 3 };

enum SpCode {
  SP_EMBED = 0,    /* out[T, n] = rows of the packed table `weight` [vocabulary = k, n] for the pass's tokens, or its inputs */
  SP_NORM = 1,     /* out[T, n] = in[T, n] / rms(in) * scale[n] */
  SP_LINEAR = 2,   /* out[T, n] (+)= in[T, k] weight[n, k]^T + bias[n] */
  SP_ROTATE = 3,   /* qkv[T, (heads + 2 kv_heads) dim]: norm and rotate queries and keys; store keys and values */
  SP_ATTEND = 4,   /* out[T, heads dim] = attention of the queries in `in` (= qkv) over each row's own keys */
  SP_COPY = 5,     /* out[T, n] = in[T, n] */
};

enum SpFlag {
  SP_ADD = 1,      /* SP_LINEAR: add to out (a residual) */
  SP_SILU = 2,     /* SP_LINEAR: weight holds gate and up in turn; out[T, n] = silu(gate) * up, each with its bias */
};

typedef struct {
  int32_t code, type;        /* SpCode; SpType of weight, or of the cache */
  int32_t flags, layer;
  int64_t n, k;
  const void *weight;        /* packed by sp_pack */
  const float *scale;        /* SP_NORM: n; SP_ROTATE: the queries' norm, dim, or NULL */
  const float *bias;         /* SP_LINEAR: n (SP_SILU: [2, n], gate and up); SP_ROTATE: the keys' norm, dim; or NULL */
  const float *in;
  float *out;
  int32_t heads, kv_heads, dim, window; /* window 0 = none */
  float eps, factor;         /* of norms; of attention scores */
} SpOp;

/* One sequence of a pass: rows first .. first + rows - 1; its cache held `start` positions before. The first `chain` rows are
 * committed tokens, the others nodes of a tree whose parents (-1 = the last of the chain) begin at parents[tree]; tree -1 = all
 * is one chain. Position p lives in storage row table[p / block] * block + p % block. All fields are 64 bits wide. */
typedef struct {
  int64_t first, rows, start, chain, tree;
  const int64_t *table;
} SpSegment;

typedef struct {
  int64_t rows, num_segments, block;
  const int64_t *tokens, *positions, *slots; /* [T]; slots = storage rows to write */
  const SpSegment *segments;
  const int64_t *parents;
  const float *cosines, *sines;              /* [positions, dim / 2] */
  void *keys, *values;                       /* layer 0's storage [rows, kv_heads, dim] */
  int64_t layer_stride;                      /* bytes from a layer's keys to the next one's; the same for values */
  const float *const *inputs;                /* [T] input embeddings in the place of tokens, NULL = look it up; or NULL: look all up */
} SpPass;

/* How a row's distribution is made of its logits: temperature 0 = everything on the best; top_k 0, top_p 1, min_p 0 = not used. */
typedef struct {
  double temperature, top_p, min_p;
  int64_t top_k;
} SpSamplingSettings;

/* What changes a row's logits before its distribution is made of them, in this order. Tokens that have no logit are passed over. */
typedef struct {
  const uint32_t *allowed;       /* if `masked`: bit v % 32 of word v / 32 = token v may come; tokens beyond the words may not */
  int64_t words, masked;
  const int64_t *biased;         /* distinct tokens, and what is added to their logits */
  const float *biases;
  int64_t num_biased;
  const int64_t *banned;         /* tokens that may not come while fewer than ban_below are drafted */
  int64_t num_banned, ban_below;
  const int64_t *seen, *counts;  /* the distinct tokens of prompt and output, and how often each is in the output */
  int64_t num_seen;
  const int64_t *drafted;        /* tokens that follow the output and count as part of it; sp_draft has its own */
  int64_t num_drafted;
  int64_t penalises;             /* whether the penalties are used */
  float repetition, presence, frequency;
} SpEdits;

/* What is drawn in sp_draft: tokens for the first `sequences` segments of a pass, each by feeding what was drawn before. */
typedef struct {
  int64_t sequences, steps;  /* steps = the most that one draws */
  int64_t width;             /* tokens that a distribution is over; a model with fewer or more logits is filled up or cut */
  const int64_t *limits;     /* [sequences] tokens to draw, 1 .. steps; they never rise from one sequence to the next */
  const SpSamplingSettings *settings;         /* [sequences] */
  const SpEdits *const *edits;    /* [sequences] or NULL; NULL = none */
  const int64_t *shared_noise;    /* [sequences] what its chances are: see sp_draw */
  const uint64_t *chances;   /* [sequences, 2] a key and a count: step i's chance is the hash of the key and count + i */
  int64_t *drawn;            /* [sequences, steps]; -1 = its distribution is none, and what follows means nothing */
  double *const *out;        /* [sequences] where each one's distributions [limit, width] go, or NULL: nobody asks for them */
} SpDraft;

int sp_version(void);
/* Instruction sets are numbered from 0, the best first; NULL behind the last. A number is an argument of whatever computes:
 * weights are packed for one set and only it can read them. */
const char *sp_name(int set);
int sp_usable(int set);                      /* whether this processor has it */

int64_t sp_packed_bytes(int set, int type, int64_t n, int64_t k);
/* Pack weights [n, k] in `source` (SP_F32 or SP_BF16) as `type`, into every `step`-th panel from `packed` on: 2 where gate and up
 * take turns, else 1. A panel holds some rows; the last one is filled up with zeros. Memory is 64-byte aligned. */
void sp_pack(int set, int threads, int type, int source, const void *weight, int64_t n, int64_t k, int64_t step, void *packed);
void sp_run(int set, int threads, const SpOp *ops, int count, const SpPass *pass);
/* Run a program on a pass, then `head` (SP_LINEAR without `in` and `out`) on each sequence's last row, and draw; and again with
 * each sequence's newest token, which goes behind the others in its block table, until all have what they want. */
void sp_draft(int set, int threads, const SpOp *ops, int count, const SpOp *head, const SpPass *pass, const SpDraft *draft);
/* out[rows, width] = the distributions that logits[rows, given] make. edits: [rows] or NULL; NULL = none. The logits of a row with edits
 * are written to. A row without a possible token is all zeros; one with a logit that is NaN or +infinity is all NaN. */
void sp_probs(int set, int threads, float *logits, int64_t rows, int64_t given, int64_t width, const SpSamplingSettings *settings,
              const SpEdits *const *edits, double *out);
/* A token drawn in proportion to weights[n]. `chance` is the key of the noise that draft and target share (shared_noise), else 64
 * random bits: the token at that share of the sum. 0 if there is no weight. */
int64_t sp_draw(int set, const double *weights, int64_t n, int shared_noise, uint64_t chance);
double sp_read(int set, int threads, const void *data, int64_t bytes); /* read it once; returns seconds */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif

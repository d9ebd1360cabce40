/* The native kernels' interface: plain C, raw pointers, no ownership. Written for Python's ctypes.
 *
 * A *program* is a list of operations over fixed buffers, recorded once for a model. A *pass* has its arguments: the
 * rows of each sequence, and the addresses of keys and values. One call runs a whole forward pass.
 *
 * Every row's result depends only on that row and the keys it sees, bit for bit: sums run in one fixed order, tiles of
 * keys begin at absolute positions, and neither the number of threads nor that of rows changes a result.
 *
 * All activations are float32. Products are float32 too, with two exceptions: rows are rounded to int8, with a scale for each 32 numbers,
 * for weights in groups of integers (groups.h), and to bfloat16 for bfloat16 weights on the sets avx512bf16 and amx, whose instructions
 * take no other type, unless SP_ALIKE is set. Attention computes in float32 on these sets too, so that integer weights give the same text on every set.
 * T = number of rows of the pass.
 */
#ifndef SPECULANT_H
#define SPECULANT_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* From SP_INT8 on, weights are groups of integers (groups.h), except for SP_FP8 (fp8.h). From SP_Q8_0 to SP_ZERO8, blocks can be packed
 * (blocks.h); up to SP_MXFP4, the names are GGUF's. */
enum SpType {
  SP_F32 = 0, SP_BF16 = 1, SP_F16 = 2, SP_BF12 = 3, SP_INT8 = 4, SP_Q8_0 = 5, SP_Q4_0 = 6, SP_Q4_1 = 7, SP_Q5_0 = 8, SP_Q5_1 = 9,
  SP_Q4_K = 10, SP_Q5_K = 11, SP_Q6_K = 12, SP_IQ4_NL = 13, SP_MXFP4 = 14, SP_ZERO4 = 15, SP_ZERO8 = 16, SP_FP8 = 17,
};

enum SpCode {
  SP_EMBED = 0,    /* out[T, n] = factor * rows of the packed table `weight` [vocabulary = k, n] for the pass's tokens, or its inputs;
                      plus the rows of `learned` for the positions */
  SP_NORM = 1,     /* out[T, n] = in[T, n] / rms(in) * scale[n] + bias[n] */
  SP_LINEAR = 2,   /* out[T, n] (+)= cap(activation(factor * (in[T, k] weight[n, k]^T + bias[n]))) */
  SP_ROTATE = 3,   /* qkv[T, (heads + 2 kv_heads) dim]: norm and rotate queries and keys; store keys and values */
  SP_ATTEND = 4,   /* out[T, heads dim] = attention of the queries in `in` (= qkv) over each row's own keys, or over its source. A score is
                      cap(factor * query key) + the number of the distance from the row to the key */
  SP_COPY = 5,     /* out[T, n] = factor * in[T, n] */
  SP_GATE = 6,     /* out[T, n] = activation(in[T, n]) * out[T, n], with the bits of SP_GATED */
  SP_ROUTE = 7,    /* in[T, n] = scores of n experts; select the `used` largest of each row after `bias` is added, and multiply their weights
                      by `factor`. The operations below use the selection: */
  SP_EXPERTS = 8,  /* out[pairs, n] = in weight^T + bias, by the matrix of each pair's expert: see csrc/experts.h */
  SP_COMBINE = 9,  /* out[T, n] (+)= factor * the weighted sum of each row's pairs in[pairs, n] */
  SP_CONVOLVE = 10, /* out[T, n] = activation(the sum over j of scale[j, n] * the column of the position window - 1 - j before + bias[n]),
                      where the column of a row is in[T, n] */
  SP_RECUR = 11,   /* out[T, heads dim] = a recurrence over rows in[T, n] of queries, keys and values: see csrc/states.h */
};
/* Rows of a sequence that may wait for a later pass to add them to its states. */
enum { SP_MOST_PENDING = 16 };

enum SpFlag {
  SP_ADD = 1,      /* SP_LINEAR: add to out (a residual). SP_NORM: out += factor * the norm of another array */
  SP_GATED = 2,    /* SP_LINEAR: weight has gate and up, interleaved by panels; out[T, n] = activation(gate) * up, each with its bias.
                      SP_CONVOLVE: in[T, 3 n] has b, c and x; the column is b * x, and out[T, n] is c times the result */
  SP_CENTRED = 4,  /* norms: the mean is subtracted first */
  SP_ALL_HEADS = 8, /* SP_ROTATE: one norm of all queries together, and one of all keys, instead of one for each head */
  SP_GATHER = 16,  /* SP_EXPERTS: `in` has the rows of the pass, [T, k], instead of a row for each pair */
  SP_RENORMALISE = 32, /* SP_ROUTE: weights are a softmax of the selected scores, instead of all scores; see SP_WEIGHTS */
  SP_TOKENS = 64,  /* SP_EMBED: look all tokens up, also those of rows that have inputs */
  SP_AHEAD = 128,  /* SP_ATTEND: a row also sees the later rows of its sequence in the pass, which are one chain */
  SP_FIXED = 256,  /* SP_ATTEND: the window of each row begins where that of its sequence's first row in the pass begins */
  SP_SOURCE = 512, /* SP_ATTEND: a row sees all positions of its sequence's source and nothing else; without a window */
  SP_SCAN = 1024,  /* SP_RECUR: Mamba 2 in place of a gated delta rule */
  SP_EACH = 2048,  /* SP_GATE: `in` has a number for each row, [T] */
  SP_WEIGHTS = 4096, /* SP_ROUTE: scores are weights already; with SP_RENORMALISE they are divided by 1e-6 + the sum of the selected ones */
  SP_ALIKE = 8192, /* SP_LINEAR: weights that are floats are summed with the same bits on all sets of instructions, even if this set has a
                      faster way. Weights in groups of integers always are */
};

enum SpActivation {
  SP_NO_ACTIVATION = 0, SP_SILU = 1,
  SP_GELU = 2,         /* x times the normal distribution's integral up to x */
  SP_GELU_TANH = 3,    /* its approximation by tanh */
  SP_RELU = 4,
  SP_CLAMPED = 5,      /* SP_GATED, SP_GATE: (up + 1) gate sigmoid(factor * gate), of gate <= softcap and |up| <= softcap */
  SP_SIGMOID = 6,
};

/* How many items the arrays of an operation have, by their fields; sp_check alone reads this. weight: bytes; SP_EXPERTS: addresses. matrix:
 * the bytes of an expert's matrix, the smallest one's. */
typedef struct {
  int64_t weight, scale, bias, key_scale, key_bias, in, out, copy, learned, sinks, order, distances, matrix, gates;
} SpSizes;

/* Fields that an operation does not mention are not read by it. A factor, stride or soft cap of 0 is not used: the factor is then 1. */
typedef struct {
  int32_t code, type;        /* SpCode; SpType of the weight, or of the cache: SP_F32, SP_BF16 or SP_INT8 */
  int32_t flags, activation;
  int32_t layer, group;      /* whose keys and values or records, and whose block tables and slots */
  int64_t n, k;
  const void *weight;        /* packed by sp_pack; SP_EXPERTS: the addresses of the experts' matrices */
  const float *scale;        /* SP_NORM: n; SP_ROTATE: the queries' norm, dim (heads dim with SP_ALL_HEADS), or NULL; SP_CONVOLVE:
                                [window, n]; SP_RECUR: the norm of each head's result, dim (heads dim with SP_SCAN), or NULL */
  const float *bias;         /* SP_LINEAR: n (SP_GATED: [2, n], gate and up); SP_EXPERTS: the same by expert; SP_NORM, SP_CONVOLVE, SP_ROUTE: n;
                                SP_ROTATE: of the queries' norm; or NULL. SP_RECUR with SP_SCAN: factors D of values, [heads] */
  const float *key_scale, *key_bias; /* SP_ROTATE: the keys' norm, dim (kv_heads dim with SP_ALL_HEADS); or NULL. SP_RECUR: rates and their bias, [heads] */
  const float *in;
  float *out;
  float *copy;               /* SP_NORM: [T, n], the rows of `in` are copied to it; or NULL */
  const float *learned;      /* SP_EMBED: learned positions [positions, n], or NULL */
  const float *sinks;        /* SP_ATTEND: a score for each head that has no value, [heads]; or NULL */
  int32_t heads, kv_heads, dim, window; /* window 0 = none. SP_RECUR: kv_heads of k numbers, and `heads` states [k, dim]. It and the
                                           SP_CONVOLVE before it have the same n, k, heads, kv_heads, dim and window */
  int32_t rope, rotated;     /* SP_ROTATE: whose angles; the first dimensions of each head that are rotated, 0 = none */
  float eps, factor, softcap; /* of norms; see SP_EMBED, SP_NORM, SP_LINEAR, SP_COPY, and of attention scores; c: y becomes c tanh(y / c).
                                 SP_RECUR with SP_SCAN: the least t is `factor`, the largest `softcap` */
  int64_t stride;            /* from a row to the next, in numbers: SP_LINEAR: of `out`, 0 = n; SP_ROTATE and SP_ATTEND: of `in`,
                                0 = (heads + 2 kv_heads) dim; SP_CONVOLVE: of `in`; SP_RECUR: of `gates` */
  int64_t used;              /* SP_ROUTE, SP_EXPERTS, SP_COMBINE: experts of each row */
  const int32_t *order;      /* SP_LINEAR with weights in groups: the number of `in` that each of the k columns multiplies; or NULL: i for column i */
  const float *distances;    /* SP_ATTEND: a number for each distance (the key's position minus the row's) from -before to after, whose ends
                                stand for all distances beyond, [heads, before + 1 + after]; or NULL. The positions of tree nodes are those
                                along their path. */
  int64_t before, after;
  const float *gates;        /* SP_RECUR: each row's z [heads dim], b [heads] (with SP_SCAN other numbers, [n]) and a [heads] */
  SpSizes has;
} SpOp;

/* One sequence of a pass: rows first .. first + rows - 1, after `start` positions in its cache. The first `chain` rows are
 * committed tokens, the others nodes of a tree whose parents (-1 = the last of the chain) begin at parents[tree]; tree -1 = all
 * rows are one chain. If the tree's first `done` nodes are in the cache already, after the `start` positions, then chain is 0 and the
 * rows are the nodes after them. The slot of position p is table[p / block] * block + p % block, where a table has `blocks` entries
 * for each group of layers. Entries before the window of all rows are not read. `source` is the block table of the sequence's source,
 * and source_length the number of its positions, at least 1 if an operation has SP_SOURCE. The last six fields are a StateRows of
 * src/speculant/cache/base.py, where -1 is no record: the rows of such a sequence are one chain. All fields are 64 bits wide. */
typedef struct {
  int64_t first, rows, start, chain, tree;
  const int64_t *table;                      /* [groups, blocks] */
  int64_t blocks, done;
  const int64_t *source;
  int64_t source_length;
  int64_t read, settled, write, certain, save, saved;
} SpSegment;

typedef struct {
  int64_t rows, num_segments, block, groups; /* groups 0 = 1 */
  const int64_t *tokens, *positions;         /* [T] */
  const int64_t *slots;                      /* [groups, T], slot mapping of keys and values */
  const SpSegment *segments;
  const int64_t *parents;
  const int64_t *angles;                     /* [T] each row of the pass: its row in the tables of angles; or NULL: its position */
  const float *const *cosines, *const *sines; /* by rope: tables [angles, rotated / 2] */
  const float *const *query_factors;         /* by rope: tables [angles] of factors of rotated queries, or NULL; or NULL for all */
  void *const *keys, *const *values;         /* by layer: its storage [slots, kv_heads, dim]; of SP_INT8 each head is `dim` bytes and a
                                                 float32 scale, which need not be aligned */
  float *const *states;                      /* by layer: its records; read for layers with a state alone */
  const float *const *inputs;                /* [T] input embedding per row, NULL = look the token up; or NULL: look all tokens up */
} SpPass;

/* What the passes of a program, and its draft, may have at most. */
typedef struct {
  int64_t rows;
  int64_t tokens, positions;     /* tokens, and positions in tables of learned ones, are below them */
  int64_t layers, groups, ropes; /* of the model: see SpPass */
  const int64_t *slots;          /* [layers] bytes of a slot's keys, and of its values */
  const int64_t *records;        /* [layers] numbers of a record; 0 = the layer has none. NULL: no layer has any */
  const int64_t *angles;         /* [ropes] numbers in a row of a table of angles */
  const int64_t *head_tokens;    /* as in SpDraft; and their number */
  int64_t num_head_tokens;
} SpBounds;

/* How a row's logits become its distribution: temperature 0 = greedy; top_k 0, top_p 1, min_p 0 = not used. */
typedef struct {
  double temperature, top_p, min_p;
  int64_t top_k;
} SpSamplingSettings;

/* Changes to a row's logits before its distribution is computed, in this order. Tokens without a logit are skipped. */
typedef struct {
  const uint32_t *allowed;       /* if `masked`: bit v % 32 of word v / 32 = token v is allowed; tokens beyond the words are not */
  int64_t words, masked;
  const int64_t *biased;         /* distinct tokens, and the values added to their logits */
  const float *biases;
  int64_t num_biased;
  const int64_t *banned;         /* impossible tokens while fewer than ban_below are drafted */
  int64_t num_banned, ban_below;
  const int64_t *seen, *counts;  /* the distinct tokens of prompt and output, and their counts in the output */
  int64_t num_seen;
  const int64_t *drafted;        /* drafted tokens after the output, counted as part of it; sp_draft sets them itself */
  int64_t num_drafted;
  int64_t penalises;             /* whether the penalties are used */
  float repetition, presence, frequency;
} SpEdits;

/* The draws of sp_draft: a tree of tokens for each of the first `sequences` segments of a pass, whose shape is known in advance. Nodes are
 * in order of depth, and siblings follow each other in order of rank. Later siblings are drawn from the distribution without the earlier
 * ones, normalised. The input of a step is the nodes of one depth that have children.
 *
 * A dynamic tree (arXiv 2406.16858) has `topk` children of the root and of the most confident `topk` nodes of each depth. Its limit is
 * topk + topk^2 + ... + topk^2 nodes. They are in order of depth, the children of a depth's most confident node first. A node's
 * confidence is the product of the scores on the way to it. */
typedef struct {
  int64_t sequences, nodes;  /* nodes = the largest limit */
  int64_t width;             /* tokens of a distribution; missing logits are -infinity, further ones are cut */
  const int64_t *limits;     /* [sequences] tokens to draw, 1 .. nodes */
  const int64_t *const *widths; /* [sequences] the most children of the root and of each node [1 + limit], NULL = a chain; NULL = all are */
  const int64_t *topk;       /* [sequences] of a dynamic tree; 0 = its shape is known; NULL = all are 0 */
  const SpSamplingSettings *settings;         /* [sequences] */
  const SpEdits *const *edits;    /* [sequences] or NULL; NULL = none */
  const int64_t *noise;      /* [sequences] kind of draw: 0 and 1 as in sp_draw, 2 = the most probable token, the first among equals */
  const uint64_t *chances;   /* [sequences, 2] a key and a count: a draw's chance is the hash of the key and count + i, where i is the
                                number of draws before it, in order of nodes; with shared noise (1), its depth below the root's children */
  int64_t *drawn;            /* [sequences, nodes]; -1 = the node does not exist, because no token is left or its parent has ended */
  double *const *out;        /* [sequences] each one's distributions [limit, width], or NULL: they are not returned */
  int64_t *parents;          /* [sequences, nodes] of dynamic trees, -1 = the root; and */
  double *scores;            /* [sequences, nodes] its probability; with shared noise (1), its share of all w e^G, where w is a token's
                                probability and G its noise: the largest is that of the token which the same distribution draws. NULL: not returned */
  double stop_below;         /* a token of a lower probability has no children; 0 = all may have some */
  double stop_path;          /* nor has one where the product of the scores on the way to it is lower */
  int64_t num_logits;        /* tokens of the model */
  const int64_t *head_tokens;  /* the token of each row of the head; other tokens have the logit -infinity. NULL = row i is token i */
  const int64_t *panels;     /* distinct panels of the head: tokens in others have the logit -infinity; NULL = all are read */
  int64_t num_panels;
  const float *carried;      /* [T, state_size] output of the row at which a token is drawn, for the row of that token; or NULL */
  float *states;             /* [T, state_size] input of the next step's rows; not the memory of `carried` */
  int64_t state_size;
} SpDraft;

/* A draw of sp_draw_rows: the row of weights, and shared_noise and chance as in sp_draw. */
typedef struct {
  int64_t row, shared_noise;
  uint64_t chance;
} SpRowDraw;

int sp_version(void);
/* Streams in which large panels of integers are packed and read: 1 on processors of AMD, else 8, whichever is faster there. It belongs to
 * the layout of packed weights, like the set. Only tests change it. */
extern int64_t sp_group_streams;
/* Instruction sets are numbered from 0, the best first; NULL after the last. The functions below take such a number:
 * weights are packed for one set and only that set can read them. */
const char *sp_name(int set);
int sp_usable(int set);                      /* whether this processor has it */
int sp_by_default(int set);                    /* whether it is used without being named */

int64_t sp_packed_bytes(int set, int type, int64_t n, int64_t k);
/* Pack weights [n, k] as `type`. `source`: SP_F32 or SP_BF16 for SP_F32 and SP_BF16; SP_F16 for SP_F16; or the type
 * itself for rows of blocks, the last of which may have weights after k; for rows of SP_INT8, a float32 scale and k bytes; and for rows of
 * SP_FP8, a float32 scale and 128 bytes for each 128 inputs, fewer bytes for the last ones. Every `step`-th panel from `packed` on is
 * written: 2 for gate and up, which are interleaved, else 1. Each panel has the same number of rows; the last is padded with zeros. Memory
 * is 64-byte aligned. */
void sp_pack(int set, int threads, int type, int source, const void *weight, int64_t n, int64_t k, int64_t step, void *packed);
/* Round weights [n, k] to rows that sp_pack takes (rounding.h): SP_INT8, SP_Q8_0, SP_Q4_0, SP_Q5_0, SP_Q5_1, SP_Q4_K,
 * SP_Q5_K or SP_Q6_K, or of SP_ZERO4 or SP_ZERO8.
 * `source`: SP_F32, SP_BF16 or SP_F16. Weights are finite. If a row ends within a block, the rest of the block is 0. */
void sp_round(int set, int threads, int type, int source, const void *weights, int64_t n, int64_t k, void *blocks);
/* out[n, k] = the numbers of rows of blocks, of the types from SP_Q8_0 to SP_ZERO8; `target`: SP_F32 or SP_BF16. */
void sp_decode(int set, int threads, int type, const void *blocks, int64_t n, int64_t k, int target, void *out);
/* SP_BF12 is a form of packed SP_BF16 weights: the same numbers in 12 bits each, or plain if that does not fit (coded.h). It begins with
 * an index, SP_INDEX_BYTES a panel, and may be made in parts, some panels after others. The first function fills the entries of a part
 * from its packed panels and k. data: bytes from the part's first entry to the place of its first panel, a multiple of 64 after the whole
 * index and earlier parts. It returns the bytes to the end of the last panel. The second function writes the panels. */
enum { SP_INDEX_BYTES = 32 };
int64_t sp_index_panels(int set, int threads, int64_t panels, int64_t k, const void *plain, void *index, int64_t data);
void sp_code_panels(int set, int threads, int64_t panels, int64_t k, const void *plain, void *index);
/* Get the pages of new memory from the system, with all threads. A byte of each is set to zero. */
void sp_touch(int set, int threads, void *memory, int64_t bytes);
/* Whether no operation reads or writes beyond the memory that its pointers have, in any pass within the bounds: what is wrong with
 * operation *at, which is `count` for the head, or NULL. Nothing else checks it: call it once for each program. head: see sp_draft; or
 * NULL. */
const char *sp_check(int set, const SpOp *ops, int count, const SpOp *head, const SpBounds *bounds, int *at);
void sp_run(int set, int threads, const SpOp *ops, int count, const SpPass *pass);
/* Run a program on a pass, then `head` (SP_LINEAR without `in` and `out`) on each sequence's last row, and draw. Repeat with the newest
 * nodes that have children until all have drawn up to their limits. The cache gets these nodes, in order, after the rows of the pass. */
void sp_draft(int set, int threads, const SpOp *ops, int count, const SpOp *head, const SpPass *pass, const SpDraft *draft);
/* out[rows, width] = the distributions of logits[rows, given]. edits: [rows] or NULL; NULL = none. The logits of a row with edits
 * are overwritten. A row without a possible token is all zeros; one with a logit that is NaN or +infinity is all NaN. */
void sp_probs(int set, int threads, float *logits, int64_t rows, int64_t given, int64_t width, const SpSamplingSettings *settings,
              const SpEdits *const *edits, double *out);
/* A token drawn with probability proportional to weights[n]. `chance` is the key of the shared Gumbel noise (shared_noise), else 64
 * random bits that select a share of the sum. 0 if all weights are 0. */
int64_t sp_draw(int set, const double *weights, int64_t n, int shared_noise, uint64_t chance);
/* tokens[count] = one draw for each of `draws` from rows of weights [rows, n]; -1 if all of a row is 0, or NaN. */
void sp_draw_rows(int set, int threads, const double *weights, int64_t n, const SpRowDraw *draws, int64_t count, int64_t *tokens);
/* out[n] = weights[n] divided by their sum. */
void sp_normalise(int set, const double *weights, int64_t n, double *out);
double sp_read(int set, int threads, const void *data, int64_t bytes); /* read the memory once; returns seconds */
uint64_t sp_checksum(int set, int threads, const void *data, int64_t bytes); /* the same on every set; another word = another sum */
/* items[most] = the work items of each stage of this thread's last sp_run, in order; threads wait for each other after every stage.
 * Returns the number of stages. For tests. */
int64_t sp_stage_items(int set, int64_t *items, int64_t most);

/* A suffix automaton with counts, defined by src/speculant/kernels/suffix_index.py. One thread at a time may use it.
 * Token ids are below 2^31. An index that ran out of memory (NULL or 0) takes no more tokens. */
typedef struct SpSuffix SpSuffix;
SpSuffix *sp_suffix_new(int64_t depth, double factor, double min_prob);
void sp_suffix_delete(SpSuffix *index);
void sp_suffix_begin(SpSuffix *index); /* the next tokens begin another text */
int sp_suffix_extend(SpSuffix *index, const int64_t *tokens, int64_t n);
/* The end of a text to continue by at most `limit` tokens. Its `unread` tokens are appended to its own index, and those `ahead`, which
 * follow, are not. `alone`: the tokens ahead are the whole text. */
typedef struct {
  int64_t indexes, unread, ahead, limit, alone;
} SpSuffixQuery;
/* The best continuation for each of n queries, the earlier index on a tie, with their ratios: rows of `room` items, and room for one row
 * after the last. Each limit is at most `room`. indexes and tokens: of all queries in order, each one's own index first.
 * found[n, 2] = how many tokens came, and how many matched. Returns 0 if memory ran out. */
int sp_suffix_look_up(const SpSuffixQuery *queries, int64_t n, SpSuffix *const *indexes, const int64_t *tokens, int64_t room,
                      int64_t *drafted, double *ratios, int64_t *found);
int64_t sp_suffix_bytes(const SpSuffix *index);

/* The latest places of strings of `shortest` to `longest` tokens of a text, defined by `RecentMatches` in
 * src/speculant/drafting/lookup/reading.py. What a suffix index says of threads, ids and memory holds here too. */
typedef struct SpMatches SpMatches;
SpMatches *sp_matches_new(int64_t shortest, int64_t longest, int64_t most_scored);
void sp_matches_delete(SpMatches *matches);
/* The `unread` tokens are read; those `ahead` follow them and are not. */
typedef struct {
  int64_t unread, ahead, limit;
} SpMatchesQuery;
/* Row i of `drafted`, of `room` tokens, gets min(limit, room) tokens if matched[i] > 0. Returns 0 if memory ran out. */
int sp_matches_look_up(const SpMatchesQuery *queries, int64_t n, SpMatches *const *matches, const int64_t *tokens, int64_t room,
                       int64_t *drafted, int64_t *matched);
int64_t sp_matches_bytes(const SpMatches *matches);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif

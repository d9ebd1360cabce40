// Distributions from logits, and draws from them, as defined in kernels/reference.py. Distributions are doubles. A row is cut
// into chunks of fixed size; sums run within a chunk, then over the chunks, always in the same order.
#pragma once
#include <float.h>
#include "reals.h"
#include "speculant.h"
#include "edits.h"
#include "parallel.h"

namespace SP_NAMESPACE {

constexpr int64_t CHUNK = 4096;
constexpr double FIRST_LOOK = 8.0;  // nats below the best: the candidates of a filtered row that are examined first

static inline int64_t chunks_of(int64_t n) { return (n + CHUNK - 1) / CHUNK; }
static inline int64_t end_of(int64_t chunk, int64_t n) { return (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n; }

struct Share {  // partial results of one chunk of a row
  float max;     // NaN if a score is NaN or +infinity
  int64_t at;    // index of the largest score, or of the winner of a race
  double sum, best;
};

struct Candidate {
  float score;
  int32_t token;
  double weight;
};

// Rows of logits and the memory for their distributions.
struct ProbsJob {
  float *logits;
  int64_t rows, given, width;  // given: tokens with a logit; width: tokens of a distribution
  const SpSamplingSettings *settings;
  const SpEdits *const *edits;  // [rows] or NULL
  double *const *out;  // [rows]
  Share *shares;       // [rows, chunks]

  int64_t chunks() const { return chunks_of(width); }
  int64_t known() const { return given < width ? given : width; }
  float *scores(int64_t row) const { return logits + row * given; }
  double *probs_of(int64_t row) const { return out[row]; }
  Share *of(int64_t row) const { return shares + row * chunks(); }
};

static inline bool is_filtered(const SpSamplingSettings &settings) {
  return settings.temperature > 0 && (settings.top_k > 0 || settings.top_p < 1.0 || settings.min_p > 0.0);
}

static void edit_row(const ProbsJob &job, int64_t row) {
  if (job.edits[row]) edit(*job.edits[row], job.scores(row), job.known());
}

static void find_best(const ProbsJob &job, int64_t row, int64_t chunk) {
  const float *scores = job.scores(row);
  const int64_t begin = chunk * CHUNK, end = begin + CHUNK < job.known() ? begin + CHUNK : job.known();
  const Vec lowest = splat(-FLT_MAX);
  Vec most = splat(-INFINITY), sound = zero();  // 0, or NaN once a score is NaN or +infinity
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    const Vec score = load(scores + i), raised = max(lowest, score);
    most = max(most, score), sound = add(sound, sub(raised, raised));
  }
  float best = most_lane(most);
  bool failed = std::isnan(sum_lanes(sound));
  for (; i < end; i++) best = scores[i] > best ? scores[i] : best, failed = failed || !(scores[i] < INFINITY);
  if (failed) {
    job.of(row)[chunk] = {NAN, begin, 0.0, 0.0};
    return;
  }
  int64_t at = begin;
  while (at < end && scores[at] != best) at++;
  job.of(row)[chunk] = {best, at, 0.0, 0.0};
}

static inline const Share *best_share(const ProbsJob &job, int64_t row) {
  const Share *best = job.of(row);
  for (int64_t chunk = 1; chunk < job.chunks() && !std::isnan(best->max); chunk++)
    if (!(job.of(row)[chunk].max <= best->max)) best = job.of(row) + chunk;
  return best;
}

// Whether a row has a distribution: some token is possible, and every score is a number.
static inline bool is_sound(const ProbsJob &job, int64_t row) { return std::isfinite(best_share(job, row)->max); }

static void weigh(const ProbsJob &job, int64_t row, int64_t chunk) {
  const Share *best = best_share(job, row);
  const int64_t begin = chunk * CHUNK, end = begin + CHUNK < job.width ? begin + CHUNK : job.width;
  const int64_t known = end < job.known() ? end : job.known();
  double *probs = job.probs_of(row);
  if (!std::isfinite(best->max)) {
    for (int64_t i = begin; i < end; i++) probs[i] = best->max < 0 ? 0.0 : NAN;
    return;
  }
  if (job.settings[row].top_k > 0 && job.settings[row].temperature > 0) return;  // `filter` weighs the candidates
  Share &share = job.of(row)[chunk];
  share.sum = 0.0;
  if (job.settings[row].temperature <= 0) {
    memset(probs + begin, 0, (end - begin) * sizeof(double));
    if (begin <= best->at && best->at < end) probs[best->at] = share.sum = 1.0;
    return;
  }
  const Reals top = splat_reals(best->max), temperature = splat_reals(job.settings[row].temperature);
  RealSums sums;
  int64_t i = begin;
  for (; i + 8 <= known; i += 8)
    for (int v = 0; v < REAL_SUMS; v++) {
      const Reals weight = exp_reals((load_floats(job.scores(row) + i + v * REALS) - top) / temperature);
      store_reals(probs + i + v * REALS, weight);
      sums.of[v] += weight;
    }
  for (int v = 0; i < end; i += REALS, v = (v + 1) % REAL_SUMS) {  // the remainder, and tokens without a logit
    const int64_t count = end - i < REALS ? end - i : REALS;
    float scores[REALS];
    for (int64_t j = 0; j < REALS; j++) scores[j] = i + j < known ? job.scores(row)[i + j] : -INFINITY;
    const Reals weight = exp_reals((load_floats(scores) - top) / temperature);
    memcpy(probs + i, &weight, count * sizeof(double));
    sums.of[v] += weight;
  }
  share.sum = sums.all();
}

static inline double total(const ProbsJob &job, int64_t row) {
  double sum = 0.0;
  for (int64_t chunk = 0; chunk < job.chunks(); chunk++) sum += job.of(row)[chunk].sum;
  return sum;
}

static inline bool before(const Candidate &a, const Candidate &b) {
  return a.score > b.score || (a.score == b.score && a.token < b.token);
}

static inline void swap(Candidate &a, Candidate &b) {
  const Candidate c = a;
  a = b, b = c;
}

// Move the candidates that stay (the first ones in order of score) to the front and return their number.
// stays(count, sum, weight): whether a candidate of this weight stays, given `count` better ones of total weight `sum`.
template <typename Stays>
static int64_t keep_first(Candidate *items, int64_t size, Stays stays) {
  int64_t begin = 0, end = size;  // items before `begin` stay, items from `end` on do not
  double sum = 0.0;
  while (begin < end) {
    const int64_t last = end - 1, middle = begin + (last - begin) / 2;  // the pivot is the median of three
    if (before(items[middle], items[begin])) swap(items[middle], items[begin]);
    if (before(items[last], items[begin])) swap(items[last], items[begin]);
    if (before(items[middle], items[last])) swap(items[middle], items[last]);
    const Candidate pivot = items[last];
    int64_t split = begin;
    double inside = 0.0;
    for (int64_t at = begin; at < last; at++)
      if (before(items[at], pivot)) inside += items[at].weight, swap(items[at], items[split++]);
    swap(items[split], items[last]);
    if (stays(split, sum + inside, pivot.weight))
      begin = split + 1, sum += inside + pivot.weight;
    else
      end = split;
  }
  return begin;
}

// Collect the tokens of a row that are at most `look` nats below its best.
static void collect(const ProbsJob &job, int64_t row, double look, List<Candidate> &found) {
  const float *scores = job.scores(row), top = best_share(job, row)->max;
  const double temperature = job.settings[row].temperature;
  const float least = (float)(top - look * temperature);
  found.resize(0);
  for (int64_t chunk = 0; chunk < job.chunks(); chunk++) {
    if (!(job.of(row)[chunk].max >= least)) continue;
    const int64_t begin = chunk * CHUNK, end = begin + CHUNK < job.known() ? begin + CHUNK : job.known();
    for (int64_t i = begin; i < end; i++)
      if (scores[i] >= least) {
        const double weight = exp_reals(splat_reals(((double)scores[i] - (double)top) / temperature))[0];
        if (weight > 0) found.push({scores[i], (int32_t)i, weight});
      }
  }
}

// Whether these candidates contain the cut of a row, so that more are not needed.
static bool is_enough(const SpSamplingSettings &settings, const List<Candidate> &found, double look, double all) {
  if (settings.top_k > 0) return found.size >= settings.top_k;
  if (settings.min_p >= exp_reals(splat_reals(1.0 - look))[0]) return true;  // a nat of slack: `least` in `collect` is rounded
  double sum = 0.0;
  for (int64_t i = 0; i < found.size; i++) sum += found.items[i].weight;
  return settings.top_p < 1.0 && sum >= settings.top_p * all;
}

// Top-k, then top-p of the remainder, then min-p; among equal scores the lowest ids stay.
static void filter(const ProbsJob &job, int64_t row) {
  static thread_local List<Candidate> found;
  const SpSamplingSettings &settings = job.settings[row];
  double all = settings.top_k > 0 ? 0.0 : total(job, row);
  for (double look = FIRST_LOOK;; look = look < 32.0 ? 4.0 * look : INFINITY) {
    collect(job, row, look, found);
    if (look == INFINITY || is_enough(settings, found, look, all)) break;
  }
  int64_t kept = found.size;
  if (settings.top_k > 0) {
    kept = keep_first(found.items, kept, [&](int64_t count, double, double) { return count < settings.top_k; });
    all = 0.0;
    for (int64_t i = 0; i < kept; i++) all += found[i].weight;
  }
  kept = keep_first(found.items, kept, [&](int64_t, double sum, double weight) {
    return (settings.top_p >= 1.0 || sum < settings.top_p * all) && weight >= settings.min_p;
  });
  double sum = 0.0;
  for (int64_t i = 0; i < kept; i++) sum += found[i].weight;
  memset(job.probs_of(row), 0, job.width * sizeof(double));
  for (int64_t i = 0; i < kept; i++) job.probs_of(row)[found[i].token] = found[i].weight / sum;
}

static void normalise(const ProbsJob &job, int64_t row, int64_t chunk) {
  // Filtered and greedy rows are normalised already; a row without a distribution stays as it is.
  if (is_filtered(job.settings[row]) || job.settings[row].temperature <= 0 || !is_sound(job, row)) return;
  const double sum = total(job, row);
  const int64_t begin = chunk * CHUNK, end = begin + CHUNK < job.width ? begin + CHUNK : job.width;
  double *probs = job.probs_of(row);
  for (int64_t i = begin; i < end; i++) probs[i] /= sum;
}

// Every thread of a parallel region calls this. It uses five stages.
static void make_probs(const ProbsJob &job, WorkQueue *stages) {
  const int64_t pieces = job.rows * job.chunks();
  stages[0].run(job.edits ? job.rows : 0, [&](int64_t row) { edit_row(job, row); });
  stages[1].run(pieces, [&](int64_t p) { find_best(job, p / job.chunks(), p % job.chunks()); });
  stages[2].run(pieces, [&](int64_t p) { weigh(job, p / job.chunks(), p % job.chunks()); });
  stages[3].run(job.rows, [&](int64_t row) { if (is_filtered(job.settings[row]) && is_sound(job, row)) filter(job, row); });
  stages[4].run(pieces, [&](int64_t p) { normalise(job, p / job.chunks(), p % job.chunks()); });
}

// The hashes of sampling/choice.py (splitmix64): of one number, and of the tokens from `first` on.
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

template <class T>
static inline T scramble(T x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

static inline uint64_t mix_in(uint64_t state, uint64_t value) { return scramble((state ^ value) + GOLDEN); }

static inline Reals uniforms(uint64_t key, int64_t first) {
  Words token;
  for (int i = 0; i < REALS; i++) token[i] = (uint64_t)(first + i);
  const Words x = scramble(token * GOLDEN + key);
  return ((Reals)(x >> 12 | 0x4330000000000000u) - 0x1p52 + 0.5) * 0x1p-52;
}

// The Gumbel-max draw as a race: w / E with E = -log u is greatest where log w + G is greatest, with Gumbel noise G = -log E. The sum is
// that of all w / E.
static void race(const double *weights, int64_t begin, int64_t end, uint64_t key, Share &share) {
  constexpr int64_t STRETCH = 8 * REALS;  // skipped together if all are zero, as most of a filtered distribution is
  Reals best = {};
  RealSums sums;
  Longs at = Longs{} - 1;
  for (int64_t from = begin; from < end; from += STRETCH) {
    Reals weight[8] = {};
    memcpy(weight, weights + from, (end - from < STRETCH ? end - from : STRETCH) * sizeof(double));
    Reals most = {};
    for (int v = 0; v < 8; v++) most = weight[v] > most ? weight[v] : most;
    if (is_zero(most)) continue;
    for (int v = 0; v < 8; v++) {
      const Reals value = weight[v] / -log_reals(uniforms(key, from + v * REALS));
      const Longs better = value > best;
      best = better ? value : best, sums.of[v % REAL_SUMS] += value;
      at = better ? Longs{} + (from + v * REALS) : at;
    }
  }
  share.best = 0.0, share.at = -1, share.sum = sums.all();
  for (int j = 0; j < REALS; j++)
    if (best[j] > share.best || (best[j] == share.best && at[j] >= 0 && at[j] + j < share.at))
      share.best = best[j], share.at = at[j] + j;
}

static void find_largest(const double *weights, int64_t begin, int64_t end, Share &share) {
  share.best = 0.0, share.at = -1;
  for (int64_t i = begin; i < end; i++)
    if (weights[i] > share.best) share.best = weights[i], share.at = i;
}

static void add_up(const double *weights, int64_t begin, int64_t end, Share &share) {
  RealSums sums;
  int64_t i = begin;
  for (; i + 8 <= end; i += 8)
    for (int v = 0; v < REAL_SUMS; v++) sums.of[v] += load_reals(weights + i + v * REALS);
  share.sum = sums.all();
  for (; i < end; i++) share.sum += weights[i];
}

// The token that wins a race; -1 if none has weight.
static int64_t winner(const Share *shares, int64_t chunks) {
  const Share *best = shares;
  for (int64_t chunk = 1; chunk < chunks; chunk++)
    if (shares[chunk].best > best->best) best = shares + chunk;
  return best->at;
}

static inline double best_of(const Share *shares, int64_t chunks) {
  double best = 0.0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) best = shares[chunk].best > best ? shares[chunk].best : best;
  return best;
}

// The token where the cumulative weight exceeds the share u of the total; the last one with weight if none does.
static int64_t at_share(const double *weights, int64_t n, double u, const Share *shares, int64_t chunks) {
  double all = 0.0, reached = 0.0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) all += shares[chunk].sum;
  const double point = all * u;
  int64_t last = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    if (reached + shares[chunk].sum <= point) {
      reached += shares[chunk].sum;
      continue;
    }
    const int64_t end = (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n;
    for (int64_t i = chunk * CHUNK; i < end; i++) {
      if (weights[i] > 0) last = i;
      reached += weights[i];
      if (reached > point) return i;
    }
  }
  if (!(weights[last] > 0))
    for (int64_t i = 0; i < n; i++)
      if (weights[i] > 0) last = i;
  return last;
}

// One draw, with the kinds of noise of SpDraft: `chance` is the key of a race, or 64 bits of which the highest 53 make a uniform.
// It takes two stages.
static inline void share_draw(const double *weights, int64_t n, int64_t noise, uint64_t chance, int64_t chunk, Share &share) {
  const int64_t begin = chunk * CHUNK, end = begin + CHUNK < n ? begin + CHUNK : n;
  if (noise == 2)
    find_largest(weights, begin, end, share);
  else if (noise)
    race(weights, begin, end, chance, share);
  else
    add_up(weights, begin, end, share);
}

static inline double sum_of(const Share *shares, int64_t chunks) {
  double all = 0.0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) all += shares[chunk].sum;
  return all;
}

// Whether the sums of a row are those of a distribution. The total of a failed row is 0 or NaN.
static inline bool is_distribution(const Share *shares, int64_t chunks) {
  const double all = sum_of(shares, chunks);
  return std::isfinite(all) && all > 0.0;
}

static inline int64_t finish_draw(const double *weights, int64_t n, int64_t noise, uint64_t chance, const Share *shares) {
  if (noise) return winner(shares, chunks_of(n));
  return at_share(weights, n, (chance >> 11) * 0x1p-53, shares, chunks_of(n));
}

static int64_t draw(const double *weights, int64_t n, int shared_noise, uint64_t chance) {
  static thread_local List<Share> shares;
  shares.resize(chunks_of(n));
  for (int64_t chunk = 0; chunk < shares.size; chunk++) share_draw(weights, n, shared_noise, chance, chunk, shares[chunk]);
  const int64_t token = finish_draw(weights, n, shared_noise, chance, shares.items);
  return token < 0 ? 0 : token;
}

// Draw from rows of weights [rows, n], with the bits of `draw`; -1 from a row that is not a distribution. A row is one work item.
static void draw_rows(const double *weights, int64_t n, const SpRowDraw *draws, int64_t count, int64_t *tokens, int threads) {
  share_out(count, count * n > CHUNK ? threads : 1, [&](int64_t i) {
    static thread_local List<Share> shares;
    const double *own = weights + draws[i].row * n;
    const int64_t chunks = chunks_of(n), noise = draws[i].shared_noise;
    shares.resize(chunks);
    for (int64_t chunk = 0; chunk < chunks; chunk++) share_draw(own, n, noise, draws[i].chance, chunk, shares[chunk]);
    const bool sound = noise || is_distribution(shares.items, chunks);  // a race without a winner returns -1 by itself
    tokens[i] = sound ? finish_draw(own, n, noise, draws[i].chance, shares.items) : -1;
  });
}

// Copy a chunk of weights, except those of one token, and add it up.
static inline void leave_out(const double *weights, int64_t begin, int64_t end, int64_t token, double *out, Share &share) {
  if (out != weights) memcpy(out + begin, weights + begin, (end - begin) * sizeof(double));
  if (begin <= token && token < end) out[token] = 0.0;
  add_up(out, begin, end, share);
}

static inline int64_t count_possible(const double *weights, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; i++) count += weights[i] > 0;
  return count;
}

static inline void divide(double *weights, int64_t begin, int64_t end, double sum) {
  for (int64_t i = begin; i < end; i++) weights[i] /= sum;
}

static void normalise_weights(const double *weights, int64_t n, double *out) {
  static thread_local List<Share> shares;
  shares.resize(chunks_of(n));
  for (int64_t chunk = 0; chunk < shares.size; chunk++) leave_out(weights, chunk * CHUNK, end_of(chunk, n), -1, out, shares[chunk]);
  divide(out, 0, n, sum_of(shares.items, shares.size));
}

static void probs(float *logits, int64_t rows, int64_t given, int64_t width, const SpSamplingSettings *by,
                  const SpEdits *const *edits, double *out, int threads) {
  static thread_local List<Share> shares;
  static thread_local List<double *> places;
  shares.resize(rows * chunks_of(width)), places.resize(rows);
  for (int64_t row = 0; row < rows; row++) places[row] = out + row * width;
  const ProbsJob job = {logits, rows, given, width, by, edits, places.items, shares.items};
  WorkQueue stages[5] = {};
  run_together(rows * width > CHUNK ? threads : 1, [&] { make_probs(job, stages); });
}

}  // namespace SP_NAMESPACE

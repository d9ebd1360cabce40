// The suffix automaton of src/speculant/kernels/suffix_index.py, with the same results.
#include <cstring>

#include "array.h"
#include "speculant.h"

namespace {

const int32_t NONE = -1, ROOT = 0;

struct State {
  int32_t length, link;    // of its longest string; to its longest suffix that also ends at other places
  int32_t followed, best;  // how often a token followed; the most frequent edge
  int32_t first;           // of its edges
};

struct Edge {
  int32_t state, token, target, count, next;  // next: of the same state
};

}  // namespace

struct SpSuffix {
  int64_t depth;
  double factor, min_prob;
  Array<State> states;
  Array<Edge> edges;
  int32_t *slots = nullptr;  // edges by the hash of state and token, linear probing
  int64_t num_slots = 0;     // a power of 2
  int32_t end = ROOT;        // the state of the whole text
  int32_t recent = ROOT;     // the state of its last `num_recent` tokens
  int64_t num_recent = 0;    // depth - 1, or the tokens of a shorter text
  Array<int64_t> tail;       // ends with the last depth - 1 tokens of the text
  bool broken = false;       // memory ran out within a change

  SpSuffix(int64_t depth, double factor, double min_prob) : depth(depth), factor(factor), min_prob(min_prob) {
    rehash(16);
    states.add({0, NONE, 0, NONE, NONE});
  }
  ~SpSuffix() { free(slots); }

  int64_t slot_of(int32_t state, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
    uint64_t mixed = key * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 29;
    return static_cast<int64_t>(mixed * 0xBF58476D1CE4E5B9u >> 20) & (num_slots - 1);
  }

  int32_t edge_of(int32_t state, int32_t token) {
    for (int64_t slot = slot_of(state, token);; slot = (slot + 1) & (num_slots - 1)) {
      const int32_t edge = slots[slot];
      if (edge == NONE || (edges[edge].state == state && edges[edge].token == token)) return edge;
    }
  }

  void put(int32_t edge) {
    int64_t slot = slot_of(edges[edge].state, edges[edge].token);
    while (slots[slot] != NONE) slot = (slot + 1) & (num_slots - 1);
    slots[slot] = edge;
  }

  void rehash(int64_t wanted) {
    int32_t *made = static_cast<int32_t *>(malloc(wanted * sizeof(int32_t)));
    if (!made) throw std::bad_alloc();
    memset(made, 0xFF, wanted * sizeof(int32_t));  // all NONE
    free(slots);
    slots = made, num_slots = wanted;
    for (int64_t edge = 0; edge < edges.size; edge++) put(static_cast<int32_t>(edge));
  }

  int32_t add_edge(int32_t state, int32_t token, int32_t target, int32_t count) {
    if (4 * (edges.size + 1) > 3 * num_slots) rehash(2 * num_slots);
    const int32_t edge = edges.add({state, token, target, count, states[state].first});
    states[state].first = edge;
    put(edge);
    return edge;
  }

  // The state of the strings of `state` plus a token; `target` has these and maybe longer ones.
  int32_t part(int32_t state, int32_t token, int32_t target) {
    if (states[target].length == states[state].length + 1) return target;
    const int32_t made = states.add({states[state].length + 1, states[target].link, states[target].followed, NONE, NONE});
    states[target].link = made;
    for (int32_t edge = states[target].first; edge != NONE; edge = edges[edge].next) {
      const Edge known = edges[edge];
      const int32_t copied = add_edge(made, known.token, known.target, known.count);
      if (edge == states[target].best) states[made].best = copied;
    }
    for (; state != NONE; state = states[state].link) {
      const int32_t edge = edge_of(state, token);
      if (edges[edge].target != target) break;
      edges[edge].target = made;
    }
    return made;
  }

  // Append a token to the text of a state; return the state of the longer text.
  int32_t grow(int32_t state, int32_t token) {
    const int32_t known = edge_of(state, token);
    if (known != NONE) return part(state, token, edges[known].target);  // an earlier text has it
    const int32_t made = states.add({states[state].length + 1, ROOT, 0, NONE, NONE});
    int32_t found = NONE;
    for (; state != NONE && (found = edge_of(state, token)) == NONE; state = states[state].link) add_edge(state, token, made, 0);
    if (state != NONE) {
      const int32_t link = part(state, token, edges[found].target);
      states[made].link = link;
    }
    return made;
  }

  // The state of the suffix of this length of a state's strings.
  int32_t holder(int32_t state, int64_t length) {
    while (state != ROOT && states[states[state].link].length >= length) state = states[state].link;
    return state;
  }

  // Count a token as a follower of every suffix of the recent tokens.
  void count(int32_t token) {
    for (int32_t state = recent; state != NONE; state = states[state].link) {
      State &own = states[state];
      const int32_t edge = edge_of(state, token);
      own.followed++;
      if (++edges[edge].count >= (own.best == NONE ? 0 : edges[own.best].count)) own.best = edge;
    }
  }

  void append(int32_t token) {
    end = grow(end, token);
    recent = holder(recent, num_recent);
    count(token);
    num_recent = num_recent + 1 < depth ? num_recent + 1 : depth - 1;
    recent = holder(edges[edge_of(recent, token)].target, num_recent);
    if (tail.size >= 4 * depth) {
      tail.size = num_recent;
      memmove(tail.items, tail.items + 4 * depth - num_recent, num_recent * sizeof *tail.items);
    }
    tail.add(token);
  }

  // The state and the length of the longest suffix of a context that is in the index.
  int32_t match(const int64_t *context, int64_t n, int64_t &length) {
    int32_t state = ROOT;
    length = 0;
    for (int64_t i = n < depth ? 0 : n - depth + 1; i < n; i++) {
      const int32_t token = static_cast<int32_t>(context[i]);
      int32_t edge;
      while ((edge = edge_of(state, token)) == NONE && state != ROOT) {
        state = states[state].link;
        length = states[state].length;
      }
      if (edge != NONE) state = edges[edge].target, length++;
    }
    return state;
  }

  // The most tokens of a continuation after a match of more than `above` and up to `length` tokens.
  int64_t most_tokens(int64_t above, int64_t length) const {
    int64_t most = 0;
    for (; length > above; length--) {
      const int64_t wanted = static_cast<int64_t>(factor * static_cast<double>(length)), room = depth - length;
      const int64_t here = wanted < room ? wanted : room;
      most = here > most ? here : most;
    }
    return most;
  }

  // Follow the most frequent edges from a state, up to `most`; returns their number.
  int64_t follow(int32_t state, int64_t most, int64_t *tokens, double *ratios, double &score) {
    double product = 1;
    int64_t n = 0;
    score = 0;
    for (int32_t edge; n < most && (edge = states[state].best) != NONE; state = edges[edge].target) {
      const double ratio = static_cast<double>(edges[edge].count) / static_cast<double>(states[state].followed);
      product *= ratio;
      if (product < min_prob) break;
      score += product;
      tokens[n] = edges[edge].token, ratios[n++] = ratio;
    }
    return n;
  }

  // Append tokens; returns false if memory ran out, and then the index takes no more.
  bool extend(const int64_t *tokens, int64_t n) {
    if (broken) return false;
    try {
      for (int64_t i = 0; i < n; i++) append(static_cast<int32_t>(tokens[i]));
    } catch (const std::bad_alloc &) {
      broken = true;
    }
    return !broken;
  }

  // Replaces the continuation in `tokens` and `ratios` of `best` tokens and this score if it has a better one; returns its tokens. Both
  // have room for `room` tokens, and for a candidate after them.
  int64_t continuation(const int64_t *context, int64_t n, int64_t limit, int64_t room, int64_t *tokens, double *ratios,
                       int64_t *matched, int64_t best, double &best_score) {
    int64_t length;
    limit = limit < room ? limit : room;
    for (int32_t state = match(context, n, length); state > ROOT;) {
      const int32_t link = states[state].link;
      int64_t most = most_tokens(states[link].length, length);
      most = most < limit ? most : limit;
      if (static_cast<double>(most) > best_score) {  // no ratio is above 1
        double score;
        const int64_t found = follow(state, most, tokens + room, ratios + room, score);
        if (score > best_score) {
          best = found, best_score = score, *matched = length;
          memcpy(tokens, tokens + room, found * sizeof *tokens);
          memcpy(ratios, ratios + room, found * sizeof *ratios);
        }
      }
      state = link, length = states[link].length;
    }
    return best;
  }

  int64_t num_bytes() const {
    return static_cast<int64_t>(sizeof *this + tail.capacity * sizeof(int64_t) + states.capacity * sizeof(State) + edges.capacity * sizeof(Edge) +
                                num_slots * sizeof(int32_t));
  }
};

extern "C" {

SpSuffix *sp_suffix_new(int64_t depth, double factor, double min_prob) {
  try {
    return new SpSuffix(depth, factor, min_prob);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void sp_suffix_delete(SpSuffix *index) { delete index; }

void sp_suffix_begin(SpSuffix *index) {
  index->end = index->recent = ROOT;
  index->num_recent = index->tail.size = 0;
}

int sp_suffix_extend(SpSuffix *index, const int64_t *tokens, int64_t n) { return index->extend(tokens, n); }

int sp_suffix_look_up(const SpSuffixQuery *queries, int64_t n, SpSuffix *const *indexes, const int64_t *tokens, int64_t room,
                      int64_t *drafted, double *ratios, int64_t *found) {
  int whole = 1;
  for (int64_t i = 0; i < n; i++, drafted += room, ratios += room, found += 2) {
    const SpSuffixQuery &query = queries[i];
    Array<int64_t> &context = indexes[0]->tail;
    whole &= indexes[0]->extend(tokens, query.unread);
    const int64_t end = context.size;
    whole &= append(context, tokens + query.unread, query.ahead);
    const int64_t first = query.alone ? end : 0;
    double score = 0;
    found[0] = found[1] = 0;
    for (int64_t j = 0; j < query.indexes; j++)
      found[0] = indexes[j]->continuation(context.items + first, context.size - first, query.limit, room, drafted, ratios, found + 1,
                                          found[0], score);
    context.size = end;
    indexes += query.indexes, tokens += query.unread + query.ahead;
  }
  return whole;
}

int64_t sp_suffix_bytes(const SpSuffix *index) { return index->num_bytes(); }

}  // extern "C"

// The tables of `RecentMatches` in src/speculant/drafting/lookup/reading.py, with the same drafts. One hash table has the places of all
// lengths: a place is in one of them at most.
#include <cstring>

#include "array.h"
#include "speculant.h"

struct SpMatches {
  struct Slot {
    int32_t place, length;  // a length of 0: the slot is free
  };

  int64_t shortest, longest, most_scored;
  Array<int32_t> tokens;
  Slot *slots = nullptr;
  int64_t num_slots = 0, used = 0;  // a power of 2
  bool broken = false;              // memory ran out within a change

  SpMatches(int64_t shortest, int64_t longest, int64_t most_scored)
      : shortest(shortest), longest(longest), most_scored(most_scored) {
    rehash(16);
  }
  ~SpMatches() { free(slots); }

  // The hash of a string, from its last token backwards: longer strings with the same end continue it.
  static uint64_t extended(uint64_t hash, int32_t token) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
  }
  uint64_t hash_before(int64_t place, int64_t length) const {
    uint64_t hash = 1;
    for (int64_t i = 1; i <= length; i++) hash = extended(hash, tokens[place - i]);
    return hash;
  }

  // The slot of the string of this length before a place, or the free one where it belongs.
  Slot &slot_of(uint64_t hash, int64_t place, int64_t length) const {
    for (int64_t at = static_cast<int64_t>(hash >> 20);; at++) {
      Slot &slot = slots[at & (num_slots - 1)];
      if (!slot.length) return slot;
      if (slot.length == length && !memcmp(tokens.items + slot.place - length, tokens.items + place - length, length * sizeof(int32_t)))
        return slot;
    }
  }

  void rehash(int64_t wanted) {
    Slot *made = static_cast<Slot *>(calloc(wanted, sizeof(Slot))), *old = slots;
    if (!made) throw std::bad_alloc();
    const int64_t before = num_slots;
    slots = made, num_slots = wanted;
    for (int64_t i = 0; i < before; i++)
      if (old[i].length) slot_of(hash_before(old[i].place, old[i].length), old[i].place, old[i].length) = old[i];
    free(old);
  }

  // Enter a place as the latest one; each place whose slot is taken moves on to the next length.
  void enter(int64_t place) {
    if (place < shortest) return;
    if (4 * (used + 1) > 3 * num_slots) rehash(2 * num_slots);
    uint64_t hash = hash_before(place, shortest - 1);
    for (int64_t length = shortest; length <= longest && length <= place; length++) {
      hash = extended(hash, tokens[place - length]);
      Slot &slot = slot_of(hash, place, length);
      const Slot earlier = slot;
      slot = {static_cast<int32_t>(place), static_cast<int32_t>(length)};
      if (!earlier.length) {
        used++;
        return;
      }
      place = earlier.place;
    }
  }

  bool read(const int64_t *given, int64_t n) {
    if (broken) return false;
    try {
      for (int64_t i = 0; i < n; i++) {
        enter(tokens.size);
        tokens.add(static_cast<int32_t>(given[i]));
      }
    } catch (const std::bad_alloc &) {
      broken = true;
    }
    return !broken;
  }

  // How many tokens before a place equal the text's end, from `length` to `most`.
  int64_t matched(int64_t place, int64_t length, int64_t most) const {
    most = most < place ? most : place;
    while (length < most && tokens[place - length - 1] == tokens[tokens.size - length - 1]) length++;
    return length;
  }

  // The latest place of the longest match of the text's end; returns its length, 0 = there is none.
  int64_t find(int64_t &found) const {
    const int64_t end = tokens.size;
    int64_t best = 0;
    found = 0;
    if (end < shortest) return 0;
    uint64_t hash = hash_before(end, shortest - 1);
    for (int64_t length = shortest; length <= longest && length <= end && best < longest; length++) {
      hash = extended(hash, tokens[end - length]);
      const Slot &slot = slot_of(hash, end, length);
      if (!slot.length) break;
      const int64_t own = matched(slot.place, length, longest);
      if (own > best) best = own, found = slot.place;
    }
    return best ? matched(found, best, most_scored) : 0;
  }

  // Copy up to `limit` tokens after the match, and on from the copy at the text's end; returns the length of the match.
  bool look_up(const int64_t *ahead, int64_t n, int64_t limit, int64_t *drafted, int64_t &length) {
    const int64_t end = tokens.size;
    length = 0;
    if (!append(tokens, ahead, n)) return false;
    int64_t place;
    length = find(place);
    const int64_t period = tokens.size - place;
    if (length)
      for (int64_t i = 0; i < limit; i++) drafted[i] = i < period ? tokens[place + i] : drafted[i - period];
    tokens.size = end;
    return true;
  }
};

extern "C" {

SpMatches *sp_matches_new(int64_t shortest, int64_t longest, int64_t most_scored) {
  try {
    return new SpMatches(shortest, longest, most_scored);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void sp_matches_delete(SpMatches *matches) { delete matches; }

int sp_matches_look_up(const SpMatchesQuery *queries, int64_t n, SpMatches *const *matches, const int64_t *tokens, int64_t room,
                       int64_t *drafted, int64_t *matched) {
  bool whole = true;
  for (int64_t i = 0; i < n; i++, drafted += room) {
    const SpMatchesQuery &query = queries[i];
    const int64_t limit = query.limit < room ? query.limit : room;
    whole = matches[i]->read(tokens, query.unread) && whole;
    whole = matches[i]->look_up(tokens + query.unread, query.ahead, limit, drafted, matched[i]) && whole;
    tokens += query.unread + query.ahead;
  }
  return whole;
}

int64_t sp_matches_bytes(const SpMatches *matches) {
  return static_cast<int64_t>(sizeof *matches + matches->tokens.capacity * sizeof(int32_t) + matches->num_slots * sizeof(SpMatches::Slot));
}

}  // extern "C"

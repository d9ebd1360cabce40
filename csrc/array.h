// A growing array of plain values; large ones grow without being copied.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

template <typename T>
struct Array {
  T *items = nullptr;
  int64_t size = 0, capacity = 0;

  ~Array() { free(items); }
  T &operator[](int64_t i) { return items[i]; }
  const T &operator[](int64_t i) const { return items[i]; }
  int32_t add(const T &item) {
    if (size == capacity) {
      const int64_t wanted = capacity + capacity / 2 + 8;
      void *moved = realloc(items, wanted * sizeof(T));
      if (!moved) throw std::bad_alloc();
      items = static_cast<T *>(moved), capacity = wanted;
    }
    items[size] = item;
    return static_cast<int32_t>(size++);
  }
};

// Append numbers to an array; returns false if memory ran out, and then it is as it was.
template <typename T>
bool append(Array<T> &array, const int64_t *numbers, int64_t n) {
  const int64_t before = array.size;
  try {
    for (int64_t i = 0; i < n; i++) array.add(static_cast<T>(numbers[i]));
  } catch (const std::bad_alloc &) {
    array.size = before;
    return false;
  }
  return true;
}

}  // namespace

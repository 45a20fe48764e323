// Which of many masses are the largest.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

// A float that is not less than 0 is ordered as its bits are; one that is less has the sign bit.
inline int32_t as_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// How many of `count` masses, a multiple of kLanes, have bits of at least `least`.
inline int64_t count_from(const float* masses, int64_t count, int32_t least) {
  IntVec total{};
  for (int64_t i = 0; i < count; i += kLanes) total -= load<IntVec>(masses + i) >= least;
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += total[i];
  return sum;
}

// Runs `found(index)` on each mass of bits in [least, stop), in order.
template <class Found>
void each_between(const float* masses, int64_t count, int32_t least, int32_t stop, Found found) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const IntVec bits = load<IntVec>(masses + i);
    for (uint32_t lanes = bits_of((bits >= least) & (bits < stop)); lanes; lanes &= lanes - 1)
      found(i + __builtin_ctz(lanes));
  }
}

// The sum of the masses that have bits of at least `least`.
inline float sum_from(const float* masses, int64_t count, int32_t least) {
  Vec total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec mass = load<Vec>(masses + i);
    total += (Vec)((IntVec)mass & ((IntVec)mass >= least));
  }
  return sum(total);
}

// Masses above `least` are chosen, and the first `ties` of those that equal it.
struct Threshold {
  int32_t least;
  int64_t ties;
};

// The threshold in [low, high) bits: `is_enough(bits)` says whether the masses from there on are. A search by halves,
// until so few masses are left that they can be sorted: `rest(left, high)` finds it among them, the largest first.
template <class IsEnough, class Rest>
Threshold search(const float* masses, int64_t count, int32_t low, int32_t high, IsEnough is_enough, Rest rest) {
  constexpr int64_t kFew = 1024;
  while (high - low > 1 && count_from(masses, count, low) - count_from(masses, count, high) > kFew) {
    const int32_t middle = low + (high - low) / 2;
    (is_enough(middle) ? low : high) = middle;
  }
  std::vector<int32_t> left;
  each_between(masses, count, low, high, [&](int64_t i) { left.push_back(as_bits(masses[i])); });
  std::sort(left.begin(), left.end(), std::greater<int32_t>());
  const int64_t taken = rest(left, high);
  const int32_t least = left[taken - 1];
  return {least, taken - (std::lower_bound(left.begin(), left.end(), least, std::greater<int32_t>()) - left.begin())};
}

// The `wanted` largest of masses, of which as many at least are not less than 0.
inline Threshold largest_masses(const float* masses, int64_t count, int64_t wanted, float most) {
  const auto is_enough = [&](int32_t bits) { return count_from(masses, count, bits) >= wanted; };
  return search(masses, count, 0, as_bits(most) + 1, is_enough, [&](const std::vector<int32_t>&, int32_t high) {
    return wanted - count_from(masses, count, high);
  });
}

// The largest masses that together reach `missing`, more than 0, or all that are more than 0, of which there are some.
inline Threshold reaching_masses(const float* masses, int64_t count, float missing, float most) {
  const auto is_enough = [&](int32_t bits) { return sum_from(masses, count, bits) >= missing; };
  return search(masses, count, 1, as_bits(most) + 1, is_enough, [&](const std::vector<int32_t>& left, int32_t high) {
    float reached = sum_from(masses, count, high);
    int64_t taken = 0;
    while (taken < (int64_t)left.size() && (!taken || reached < missing)) {
      float mass;
      std::memcpy(&mass, &left[taken++], sizeof(mass));
      reached += mass;
    }
    return taken;
  });
}

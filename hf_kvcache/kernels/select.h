// Which of many masses are the largest.
#pragma once
#include <algorithm>
#include <functional>
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

// The threshold of the masses that together are `wanted`, by `amount(bits)` of those from there on: a search by halves,
// until so few masses are left that they are looked at one by one. `rest(left, above)` puts the threshold at `left[n - 1]`
// after `n - 1` that are not smaller, and returns `n`; `above` is the amount of the masses above those.
template <class Amount, class Rest>
Threshold search(const float* masses, int64_t count, int32_t low, float most, float wanted, Amount amount, Rest rest) {
  constexpr int kHalvings = 3, kFew = 1024;  // a count of what is left costs as much as a halving
  int32_t high = as_bits(most) + 1;
  float above = 0.0f;
  int64_t few = count;
  for (int round = 0; high - low > 1 && few > kFew; ++round) {
    const int32_t middle = low + (high - low) / 2;
    const float reached = amount(middle);
    if (reached >= wanted) {
      low = middle;
    } else {
      high = middle;
      above = reached;
    }
    if (round % kHalvings == kHalvings - 1) few = count_from(masses, count, low) - count_from(masses, count, high);
  }
  std::vector<int32_t> left;
  left.reserve(2 * kFew);
  each_between(masses, count, low, high, [&](int64_t i) { left.push_back(as_bits(masses[i])); });
  const int64_t taken = rest(left, above);
  const int32_t least = left[taken - 1];
  return {least, std::count(left.begin(), left.begin() + taken, least)};
}

// The `wanted` largest of masses, of which as many at least are not less than 0.
inline Threshold largest_masses(const float* masses, int64_t count, int64_t wanted, float most) {
  const auto amount = [&](int32_t bits) { return (float)count_from(masses, count, bits); };
  return search(masses, count, 0, most, (float)wanted, amount, [&](std::vector<int32_t>& left, float above) {
    const int64_t taken = wanted - (int64_t)above;
    std::nth_element(left.begin(), left.begin() + (taken - 1), left.end(), std::greater<int32_t>());
    return taken;
  });
}

// The largest masses that together reach `missing`, more than 0, or all that are more than 0, of which there are some.
inline Threshold reaching_masses(const float* masses, int64_t count, float missing, float most) {
  const auto amount = [&](int32_t bits) { return sum_from(masses, count, bits); };
  return search(masses, count, 1, most, missing, amount, [&](std::vector<int32_t>& left, float reached) {
    std::sort(left.begin(), left.end(), std::greater<int32_t>());
    int64_t taken = 0;
    while (taken < (int64_t)left.size() && (!taken || reached < missing)) {
      float mass;
      std::memcpy(&mass, &left[taken++], sizeof(mass));
      reached += mass;
    }
    return taken;
  });
}

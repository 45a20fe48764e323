// Which of many masses are the largest.
#pragma once
#include <algorithm>
#include <cmath>
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

// The places of the masses of bits in [least, stop), in order.
inline std::vector<int32_t> places_between(const float* masses, int64_t count, int32_t least, int32_t stop) {
  std::vector<int32_t> places(count_from(masses, count, least) - count_from(masses, count, stop) + kLanes);
  int32_t* next = places.data();
  for (int64_t i = 0; i < count; i += kLanes) {
    const IntVec bits = load<IntVec>(masses + i);
    next = store_lanes(next, (int32_t)i, (bits >= least) & (bits < stop));
  }
  places.resize(next - places.data());
  return places;
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

// The largest bits in [low, high) for which `is_enough(bits)` holds, as it does for `low` and all between.
template <class IsEnough>
int32_t last_enough(int32_t low, int32_t high, IsEnough is_enough) {
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (is_enough(middle) ? low : high) = middle;
  }
  return low;
}

// The `wanted`-th largest of masses, as bits that are at least `low`, of which there are as many; all are below `high`.
inline int32_t bits_of_rank(const float* masses, int64_t count, int64_t wanted, int32_t low, int32_t high) {
  return last_enough(low, high, [&](int32_t bits) { return count_from(masses, count, bits) >= wanted; });
}

// The `wanted` largest of masses, of which as many at least are not less than 0. A sample says between which masses the
// last of them lies, nearly always, and is much faster to search than all are.
inline Threshold largest_masses(const float* masses, int64_t count, int64_t wanted, float most) {
  constexpr int64_t kSample = 1024;
  int32_t low = 0, high = as_bits(most) + 1;
  int64_t above = 0;
  if (count >= 8 * kSample) {
    alignas(64) float sample[kSample];
    for (int64_t i = 0; i < kSample; ++i) sample[i] = masses[i * count / kSample];
    const double rank = (double)wanted * kSample / count, slack = 4 * std::sqrt(rank) + 4;
    const int64_t first = (int64_t)(rank - slack), last = (int64_t)(rank + slack);
    const int64_t known = count_from(sample, kSample, 0);
    if (last <= known) {
      const int32_t bits = bits_of_rank(sample, kSample, last, 0, high);
      if (count_from(masses, count, bits) >= wanted) low = bits;
    }
    if (first >= 1 && first <= known) {
      const int32_t bits = bits_of_rank(sample, kSample, first, 0, high);
      const int64_t more = count_from(masses, count, bits);
      if (bits > low && more < wanted) high = bits, above = more;
    }
  }
  std::vector<float> left;
  left.reserve(4 * kSample);
  for (int32_t i : places_between(masses, count, low, high)) left.push_back(masses[i]);
  left.resize((left.size() + kLanes - 1) / kLanes * kLanes, -1.0f);
  const int64_t size = left.size();
  const int32_t least = bits_of_rank(left.data(), size, wanted - above, low, high);
  return {least, wanted - above - count_from(left.data(), size, least + 1)};
}

// The largest masses that together reach `missing`, more than 0, or all that are more than 0, of which there are some.
inline Threshold reaching_masses(const float* masses, int64_t count, float missing, float most) {
  const auto is_enough = [&](int32_t bits) { return sum_from(masses, count, bits) >= missing; };
  const int32_t least = last_enough(1, as_bits(most) + 1, is_enough);
  float mass;
  std::memcpy(&mass, &least, sizeof(mass));
  return {least, (int64_t)std::ceil((missing - sum_from(masses, count, least + 1)) / std::max(mass, 1e-37f))};
}

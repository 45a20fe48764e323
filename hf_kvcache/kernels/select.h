// Which of many masses are the largest.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
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

// Writes the places of the masses of bits of at least `least`, in order, and what is in the way of whole vectors after
// them. Returns how many there are.
inline int64_t places_from(const float* masses, int64_t count, int32_t least, int32_t* places) {
  int32_t* next = places;
  for (int64_t i = 0; i < count; i += kLanes)
    next = store_lanes(next, (int32_t)i, load<IntVec>(masses + i) >= least);
  return next - places;
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

// The `wanted`-th largest of masses, of which as many at least are not less than 0, as bits.
inline int32_t bits_of_rank(const float* masses, int64_t count, int64_t wanted) {
  return last_enough(0, std::numeric_limits<int32_t>::max(),
                     [&](int32_t bits) { return count_from(masses, count, bits) >= wanted; });
}

// Bits that nearly always the `wanted` largest masses have at least, and not many others: a sample says which.
inline int32_t likely_least(const float* masses, int64_t count, int64_t wanted) {
  constexpr int64_t kSample = 1024;
  if (count < 2 * kSample) return 0;
  alignas(64) float sample[kSample];
  for (int64_t i = 0; i < kSample; ++i) sample[i] = masses[i * count / kSample];
  const double rank = (double)wanted * kSample / count;
  const int64_t last = (int64_t)(rank + 4 * std::sqrt(rank) + 4);
  return last <= count_from(sample, kSample, 0) ? bits_of_rank(sample, kSample, last) : 0;
}

// The `wanted` largest of the masses that are not less than 0, or all of these; `places` of what may be among them.
inline Threshold largest_masses(const float* masses, int64_t count, int64_t wanted, int32_t* places, int64_t* found) {
  const int32_t likely = likely_least(masses, count, wanted);
  *found = places_from(masses, count, likely, places);
  if (*found < wanted && likely) *found = places_from(masses, count, 0, places);
  if (*found <= wanted) return {0, *found};
  std::vector<float> left(round_up(*found, kLanes), -1.0f);
  for (int64_t i = 0; i < *found; ++i) left[i] = masses[places[i]];
  const int32_t least = bits_of_rank(left.data(), left.size(), wanted);
  return {least, wanted - count_from(left.data(), left.size(), least + 1)};
}

// The largest masses that together reach `missing`, more than 0, or all that are more than 0, of which there are some.
inline Threshold reaching_masses(const float* masses, int64_t count, float missing) {
  const auto is_enough = [&](int32_t bits) { return sum_from(masses, count, bits) >= missing; };
  const int32_t least = last_enough(1, as_bits(std::numeric_limits<float>::infinity()), is_enough);
  float mass;
  std::memcpy(&mass, &least, sizeof(mass));
  return {least, (int64_t)std::ceil((missing - sum_from(masses, count, least + 1)) / std::max(mass, 1e-37f))};
}

// Estimated shares of the attention of all units of a row and KV head.
#pragma once
#include <cmath>

#include "parts.h"

inline float highest_of(const float* row, int64_t count) {
  Vec highest = splat(kNone);
  for (int64_t i = 0; i < count; i += kLanes) highest = largest(highest, load<Vec>(row + i));
  return largest(highest);
}

// Writes the exponentials of scores less `shift`, which none exceeds, and returns their sum; whole vectors.
inline float exponentials(const float* row, int64_t count, float shift, float* to) {
  Vec total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec power = exp_negative(load<Vec>(row + i) - shift);
    store(to + i, power);
    total += power;
  }
  return sum(total);
}

// Each split's exponentials are of its scores less its own highest one, so that its scores are used while they are at
// hand; `merge` makes them shares of the whole. Splits may be added by several threads.
class Shares {
 public:
  // `keeps` the exponentials when they are merged, for `log_rest`.
  Shares(int64_t queries, int64_t units, int64_t split, bool keeps)
      : queries(queries), units(units), split(split), stride(round_up(split, kLanes)),
        splits((units + split - 1) / split), apart(keeps ? splits * stride + kLanes : 0) {}

  // Floats of memory that `at` needs.
  int64_t size() const { return apart + queries * splits * (stride + 2) + queries + kLanes; }

  // The shares that lie in `memory`.
  Shares at(float* memory) const {
    Shares shares = *this;
    shares.masses = memory;
    shares.powers = memory + apart;
    shares.highest = shares.powers + queries * splits * stride + kLanes;
    shares.totals = shares.highest + queries * splits;
    shares.wholes = shares.totals + queries * splits;
    return shares;
  }

  // Scores of the units of a split, -inf up to a whole vector; `bias[m]` is added to those of a query.
  void add(int64_t index, Matrix scores, const float* bias) {
    const int64_t count = std::min(split, units - index * split);
    for (int64_t m = 0; m < queries; ++m) {
      const float most = highest_of(scores.at(m), count);
      highest[m * splits + index] = most + bias[m];
      totals[m * splits + index] = exponentials(scores.at(m), count, most == kNone ? 0.0f : most, of(m, index));
    }
  }

  // A unit of a split, whose scores are -inf, that must not be chosen: its shares will be less than 0.
  void hide(int64_t index, int64_t place) {
    for (int64_t m = 0; m < queries; ++m) of(m, index)[place] = -1.0f;
  }

  // Shares of one softmax with what is read anyway, by its log-sum-exps, in `masses` [units]: of query heads together.
  // Returns the share of what is read anyway.
  float merge(const float* anyway, bool is_mean) {
    float share = 0.0f;
    for (int64_t m = 0; m < queries; ++m) {
      float *own = highest + m * splits, shift = std::max(anyway[m], *std::max_element(own, own + splits));
      if (shift == kNone) shift = 0.0f;
      const float read = std::exp(anyway[m] - shift);
      float total = read;
      for (int64_t i = 0; i < splits; ++i) total += totals[m * splits + i] * (own[i] = std::exp(own[i] - shift));
      const float factor = 1.0f / std::max(is_mean ? total * queries : total, std::numeric_limits<float>::min());
      for (int64_t i = 0; i < splits; ++i) own[i] *= factor;
      share = is_mean ? share + read * factor : std::max(share, read * factor);
      wholes[m] = shift - std::log(factor);
    }
    for (int64_t index = 0; index < splits; ++index) merge_split(index, is_mean);
    std::fill(masses + units, masses + round_up(units, kLanes), -1.0f);
    return share;
  }

  // The log mass that the units of a query have, but for those at `places`, which ascend; after `merge`.
  float log_rest(int64_t m, const int32_t* places, int64_t taken) const {
    const float *factors = highest + m * splits, *sums = totals + m * splits;
    double mass = 0.0;
    for (int64_t index = 0, k = 0; index < splits; ++index) {
      const float* own = of(m, index) - index * split;
      double left = sums[index];
      for (const int64_t stop = (index + 1) * split; k < taken && places[k] < stop; ++k) left -= own[places[k]];
      mass += left * factors[index];
    }
    return mass > 0.0 ? wholes[m] + (float)std::log(mass) : kNone;
  }

  float* masses;  // where the exponentials of the first query were, if they are not kept

 private:
  const int64_t queries, units, split, stride, splits, apart;
  float *powers, *highest, *totals;  // [queries][splits][stride], [queries][splits], [queries][splits]
  float* wholes;                     // [queries]: the log mass of a share of 1

  float* of(int64_t m, int64_t index) const { return powers + (m * splits + index) * stride; }

  // Ascending, so that nothing is overwritten that is still to be read where the masses, which lie side by side, are not
  // apart.
  void merge_split(int64_t index, bool is_mean) {
    const int64_t count = std::min(split, units - index * split);
    const float* factors = highest + index;
    for (int64_t i = 0; i < count; i += kLanes) {
      Vec mass = load<Vec>(of(0, index) + i) * factors[0];
      for (int64_t m = 1; m < queries; ++m) {
        const Vec own = load<Vec>(of(m, index) + i) * factors[m * splits];
        mass = is_mean ? mass + own : largest(mass, own);
      }
      store(masses + index * split + i, mass);
    }
  }
};

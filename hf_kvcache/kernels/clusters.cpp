// Which clusters of tokens a step reads: scores of all mean keys, and the clusters whose members may weigh most.
//
// Each row, KV head and split of the clusters is scored alone; who finishes the last split of a pair chooses for it.
#include <atomic>
#include <memory>

#include "estimates.h"
#include "exact.h"
#include "select.h"

namespace {

// Quotients and remainders of numbers below 2**40 / `by` without a division, which takes longer than what it serves.
class Divider {
 public:
  explicit Divider(int64_t by) : by(by), inverse((kOne + by - 1) / by) {}
  int64_t divide(int64_t number) const { return (int64_t)((uint64_t)number * inverse >> 40); }

  // Where the row `i` of a table lies.
  int64_t place(const int64_t* ids, int64_t i) const {
    const int64_t block = divide(i);
    return (ids[block] - block) * by + i;
  }

 private:
  static constexpr uint64_t kOne = (uint64_t)1 << 40;
  const int64_t by;
  const uint64_t inverse;
};

// The sum of the sizes of the rates that have bits of at least `least`.
inline int64_t size_from(const float* rates, const int32_t* sizes, int64_t count, int32_t least) {
  IntVec total{};
  for (int64_t i = 0; i < count; i += kLanes)
    total += load<IntVec>(sizes + i) & (load<IntVec>(rates + i) >= least);
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += total[i];
  return sum;
}

// The sum of the masses of the rates that have bits of at least `least`.
inline float mass_from(const float* rates, const float* masses, int64_t count, int32_t least) {
  Vec total{};
  for (int64_t i = 0; i < count; i += kLanes)
    total += (Vec)(load<IntVec>(masses + i) & (load<IntVec>(rates + i) >= least));
  return sum(total);
}

// A thread's work at a choice.
class ClusterChooser {
 public:
  ClusterChooser(const ClusterChoice& choice, const Estimates& estimates)
      : choice(choice), call(*choice.attention), estimates(estimates), clusters(estimates.call.segments[0]),
        stride(round_up(choice.num_clusters, kLanes)), scratch(estimates.call),
        exact(call, call.num_segments - 2), in_block(choice.members.block) {}

  // Scores the mean keys of a split.
  void score(int64_t pair, int64_t index) {
    const int64_t begin = index * split_length(clusters), stop = std::min(clusters.length, begin + split_length(clusters));
    queries.move_to(estimates.call, pair);
    const Matrix seen = Split(estimates.call, clusters, pair / call.heads, pair % call.heads, begin, stop, scratch)
                            .seen_scores(queries.of(estimates.call, 0), queries.plain.data());
    for (int64_t m = 0; m < call.queries; ++m) {
      const float bias = estimates.bias[pair * call.queries + m];
      float* to = scores(pair, m) + begin;
      for (int64_t i = 0; i < stop - begin; ++i) to[i] = seen.at(m)[i] + bias;
    }
  }

  // Chooses by the scores of all splits.
  void choose(int64_t pair) {
    take_columns(pair);
    const float* anyway = exact.of(pair);
    rate(pair, anyway);
    for (int64_t m = 0; m < call.queries; ++m)
      for (int64_t i = 0; i < choice.num_clusters; ++i) scores(pair, m)[i] += masses[i];
    choice.lengths[pair] = choice.top_p ? take_masses(pair, anyway) : take_tokens(pair);
  }

 private:
  const ClusterChoice& choice;
  const Call& call;
  const Estimates& estimates;
  const Segment& clusters;
  const int64_t stride;
  Scratch scratch;
  Queries queries;
  Exact exact;
  const Divider in_block;
  std::vector<float> powers, rates, shares, masses, radii;
  std::vector<int32_t> begins, sizes, places;

  float* scores(int64_t pair, int64_t m) const { return choice.scores + (pair * call.queries + m) * choice.scores_row; }

  // What is stored of the clusters of a row and head, side by side.
  void take_columns(int64_t pair) {
    begins.assign(stride, 0);
    sizes.assign(stride, 0);
    masses.assign(stride, kNone);
    radii.assign(stride, 0.0f);
    const int64_t block = choice.clusters.block, head = pair % call.heads * choice.cluster_head;
    const int64_t* ids = choice.clusters.ids + pair / call.heads * choice.clusters.ids_row;
    for (int64_t i = 0; i < choice.num_clusters; i += block) {
      const int64_t from = head + ids[i / block] * block, count = std::min(block, choice.num_clusters - i);
      std::copy_n(choice.begins + from, count, begins.data() + i);
      std::copy_n(choice.sizes + from, count, sizes.data() + i);
      std::copy_n(choice.masses + from, count, masses.data() + i);
      std::copy_n(choice.radii + from, count, radii.data() + i);
    }
  }

  // The share of the attention that a member of each cluster may have, by query heads together.
  void rate(int64_t pair, const float* anyway) {
    powers.resize(stride);
    rates.assign(stride, 0.0f);
    for (int64_t m = 0; m < call.queries; ++m) {
      float* row = scores(pair, m);
      const int64_t dim = call.segments[0].key.dim;
      const float* query = call.query + (pair * call.queries + m) * dim;
      const float reach = (float)(choice.spread * std::abs(call.scaling) * std::sqrt(dot_product(query, query, dim)));
      std::fill(row + choice.num_clusters, row + stride, kNone);
      Vec most = splat(anyway[m]);
      for (int64_t i = 0; i < stride; i += kLanes) {
        const Vec raised = load<Vec>(row + i) + reach * load<Vec>(radii.data() + i);
        store(powers.data() + i, raised);
        most = largest(most, raised);
      }
      const float shift = largest(most);
      Vec total{};
      for (int64_t i = 0; i < stride; i += kLanes) {
        const Vec power = exp_negative(load<Vec>(powers.data() + i) - shift);
        store(powers.data() + i, power);
        total += power * __builtin_convertvector(load<IntVec>(sizes.data() + i), Vec);
      }
      const float whole = sum(total) + std::exp(anyway[m] - shift);
      agree(powers.data(), 1.0f / std::max(whole, std::numeric_limits<float>::min()), rates.data());
    }
  }

  // Adds the shares of a query head, `factor` times `powers`, to those of all.
  void agree(const float* powers, float factor, float* all) const {
    if (choice.is_mean) factor /= call.queries;
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Vec share = load<Vec>(powers + i) * factor, before = load<Vec>(all + i);
      store(all + i, choice.is_mean ? before + share : largest(before, share));
    }
  }

  // Reads the clusters of the highest rates that have `count` tokens at most.
  int64_t take_tokens(int64_t pair) {
    const auto is_too_much = [&](int32_t bits) { return size_from(rates.data(), sizes.data(), stride, bits) > choice.count; };
    // All below it, and perhaps some at it, are too many.
    const int32_t last = is_too_much(0) ? last_enough(0, as_bits(std::numeric_limits<float>::infinity()), is_too_much) : -1;
    int64_t room = choice.count - size_from(rates.data(), sizes.data(), stride, last + 1);
    return write(pair, last, [&](int32_t i) {
      const bool fits = sizes[i] <= room;
      room -= fits ? sizes[i] : room;  // in order, until one does not fit
      return fits;
    });
  }

  // Reads the clusters of the highest rates that, with what is read anyway, have the share `top_p`.
  int64_t take_masses(int64_t pair, const float* anyway) {
    shares.assign(stride, 0.0f);
    float share = 0.0f;
    for (int64_t m = 0; m < call.queries; ++m) {
      const float *row = scores(pair, m), shift = std::max(anyway[m], highest_of(row, stride));
      const float read = std::exp(anyway[m] - shift);
      const float whole = std::max(exponentials(row, stride, shift, powers.data()) + read, std::numeric_limits<float>::min());
      agree(powers.data(), 1.0f / whole, shares.data());
      share = choice.is_mean ? share + read / whole / call.queries : std::max(share, read / whole);
    }
    const float missing = choice.top_p * (mass_from(rates.data(), shares.data(), stride, 0) + share) - share;
    if (missing <= 0.0f) return 0;
    const auto is_enough = [&](int32_t bits) { return mass_from(rates.data(), shares.data(), stride, bits) >= missing; };
    const int32_t last = last_enough(0, as_bits(std::numeric_limits<float>::infinity()), is_enough);
    float taken = mass_from(rates.data(), shares.data(), stride, last + 1);
    return write(pair, last, [&](int32_t i) {
      const bool is_missing = taken < missing && shares[i] > 0.0f;
      taken += shares[i];
      return is_missing;
    });
  }

  // Reads the clusters whose rates have bits above `last`, and of those that equal it the ones that `is_taken` says.
  // Returns how many tokens that are.
  template <class IsTaken>
  int64_t write(int64_t pair, int32_t last, IsTaken is_taken) {
    places.resize(stride + kLanes);
    const int64_t found = places_from(rates.data(), stride, std::max(last, 0), places.data());
    const int64_t b = pair / call.heads, *tokens = choice.tokens.ids + b * choice.tokens.ids_row;
    const int64_t* blocks = choice.members.ids + b * choice.members.ids_row;
    const int32_t* member = choice.member + pair % call.heads * choice.member_head;
    int64_t *const first = choice.ids + pair * choice.count, *to = first;
    for (int64_t k = 0; k < found; ++k) {
      const int32_t i = places[k];
      if (i >= choice.num_clusters || (as_bits(rates[i]) == last && !is_taken(i))) continue;
      for (int64_t m = 0; m < call.queries; ++m) scores(pair, m)[i] = kNone;
      for (int64_t p = begins[i]; p < begins[i] + sizes[i]; ++p)
        *to++ = in_block.place(tokens, member[in_block.place(blocks, p)]);
    }
    return to - first;
  }
};

}  // namespace

extern "C" void hf_kvcache_decode(const Call* given);

// Choose clusters, and attend to what is read and to the other clusters.
extern "C" __attribute__((visibility("default"))) void hf_kvcache_read_clusters(const ClusterChoice* given) {
  const ClusterChoice& choice = *given;
  const Call& attention = *choice.attention;
  const Estimates estimates(choice.estimate, attention, choice.num_clusters);
  const Call& call = estimates.call;
  const int64_t pairs = call.rows * call.heads, splits = num_splits(call.segments[0]);
  std::vector<std::atomic<int64_t>> done(pairs);

#pragma omp parallel num_threads(call.num_threads) if (call.num_threads > 1)
  {
    ClusterChooser chooser(choice, estimates);
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < pairs * splits; ++item) {
      const int64_t pair = item / splits;
      chooser.score(pair, item % splits);
      if (done[pair].fetch_add(1) + 1 == splits) chooser.choose(pair);
    }
  }
  Segment& members = attention.segments[attention.num_segments - 2];
  members.length = *std::max_element(choice.lengths, choice.lengths + pairs);
  hf_kvcache_decode(&attention);
}

// Which units of tokens a step reads: estimated scores of all, shares of the attention, and the largest of them.
//
// Each row, KV head and split of the units is scored alone; who finishes the last split of a pair chooses for it.
#include <atomic>
#include <memory>

#include "estimates.h"
#include "exact.h"
#include "select.h"

namespace {

// The segment of what is chosen; those before it are read anyway.
inline int64_t chosen_index(const Choice& choice) { return choice.attention->num_segments - (choice.rest ? 2 : 1); }

// A thread's work at a choice.
class Chooser {
 public:
  Chooser(const Choice& choice, const Estimates& estimates)
      : choice(choice), call(*choice.attention), estimates(estimates), units(estimates.call.segments[0]),
        scratch(estimates.call), exact(call, chosen_index(choice)) {}

  // Scores a split of the units.
  void score(int64_t pair, int64_t index, Shares shares) {
    const int64_t b = pair / call.heads, h = pair % call.heads, begin = index * split_length(units);
    const int64_t stop = std::min(units.length, begin + split_length(units));
    queries.move_to(estimates.call, pair);
    const Matrix seen = Split(estimates.call, units, b, h, begin, stop, scratch)
                            .seen_scores(queries.of(estimates.call, 0), queries.plain.data());
    hidden.clear();
    hide_sinks(b, begin, stop);
    for (int64_t i = begin; call.mask && i < stop; ++i)
      if (!is_seen(b, i * choice.unit)) hidden.push_back(i - begin);
    for (int64_t m = 0; m < call.queries; ++m)
      for (int64_t i : hidden) seen.at(m)[i] = kNone;
    const float* bias = estimates.bias.data() + pair * call.queries;
    shares.add(index, seen, bias);
    for (int64_t i : hidden) shares.hide(index, i);
    if (!choice.scores) return;
    for (int64_t m = 0; m < call.queries; ++m) {
      float* to = all_scores(shares, m) + begin;
      for (int64_t i = 0; i < stop - begin; ++i) to[i] = seen.at(m)[i] + bias[m];
    }
  }

  // Chooses by the scores of all splits; returns the number of units taken.
  int64_t choose(int64_t pair, Shares shares) {
    const float share = shares.merge(exact.of(pair), choice.is_mean);
    const int64_t taken = take(pair, shares, share);
    for (int64_t m = 0; choice.rest && m < call.queries; ++m)
      choice.rest[pair * call.queries + m] =
          shares.log_rest(m, places.get(), taken) + (float)std::log(choice.rest_share);
    return taken;
  }

  // Floats that a pair needs.
  static int64_t size(const Choice& choice, const Shares& shares) {
    return shares.size() + (choice.scores ? choice.attention->queries * choice.num_units : 0);
  }

 private:
  const Choice& choice;
  const Call& call;
  const Estimates& estimates;
  const Segment& units;
  Scratch scratch;
  Queries queries;
  Exact exact;
  std::vector<int64_t> hidden;  // places in a split
  std::unique_ptr<int32_t[]> places;

  float* all_scores(const Shares& shares, int64_t m) const { return shares.masses + shares.size() + m * choice.num_units; }

  // Units of sinks must not be chosen.
  void hide_sinks(int64_t b, int64_t begin, int64_t stop) {
    if (!choice.num_sinks) return;
    const int64_t slot = choice.first_sink ? choice.first_sink[b] : 0, unit = choice.unit, end = slot + choice.num_sinks;
    const int64_t from = choice.sinks_are_apart ? (slot + unit - 1) / unit : slot / unit;
    const int64_t to = choice.sinks_are_apart ? end / unit : (end + unit - 1) / unit;
    for (int64_t i = std::max(from, begin); i < std::min(to, stop); ++i) hidden.push_back(i - begin);
  }

  bool is_seen(int64_t b, int64_t slot) const {
    for (int64_t i = b * call.mask_stride + slot, stop = i + choice.unit; i < stop; ++i)
      if (call.mask_is_additive ? ((const float*)call.mask)[i] > kHidden : ((const uint8_t*)call.mask)[i] != 0)
        return true;
    return false;
  }

  static constexpr float kHidden = std::numeric_limits<float>::lowest() / 2;

  // `share`: of what is read anyway.
  int64_t take(int64_t pair, const Shares& shares, float share) {
    const int64_t room = choice.count, count = round_up(choice.num_units, kLanes);
    const float* masses = shares.masses;
    if (!places) places.reset(new int32_t[count + kLanes]);
    Threshold threshold;
    int64_t found;
    if (choice.top_p) {
      const float missing = choice.top_p * (sum_from(masses, count, 0) + share) - share;
      if (missing <= 0.0f) return 0;
      threshold = reaching_masses(masses, count, missing);
      found = places_from(masses, count, threshold.least, places.get());
    } else {
      threshold = largest_masses(masses, count, room, places.get(), &found);
    }
    int64_t taken = 0;
    for (int64_t k = 0; k < found && taken < room; ++k) {
      const int32_t i = places[k], bits = as_bits(masses[i]);
      places[taken] = i;
      // Only that they are equal is foreseen: seldom.
      taken += bits == threshold.least ? threshold.ties-- > 0 : bits > threshold.least;
    }
    write(pair, shares, taken);
    return taken;
  }

  // The first `taken` places.
  void write(int64_t pair, const Shares& shares, int64_t taken) {
    const int64_t room = choice.count, b = pair / call.heads, *blocks = choice.blocks + b * choice.blocks_row;
    int64_t *ids = choice.ids + pair * room, *slots = choice.slots + pair * room;
    const int32_t per_block = (int32_t)choice.block_units;
    for (int64_t k = 0; k < taken; ++k) {
      const int32_t i = places[k], block = i / per_block;
      ids[k] = blocks[block] * per_block + i - block * per_block;
      slots[k] = i * choice.unit;
    }
    for (int64_t m = 0; choice.scores && m < call.queries; ++m) {
      const float* from = all_scores(shares, m);
      float* to = choice.scores + (pair * call.queries + m) * room;
      for (int64_t k = 0; k < taken; ++k) to[k] = from[places[k]];
    }
  }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void hf_kvcache_choose(Choice* given) {
  const Choice& choice = *given;
  const Call& attention = *choice.attention;
  const Estimates estimates(choice.estimate, attention, choice.num_units);
  const Call& call = estimates.call;
  const Segment& units = call.segments[0];
  const int64_t pairs = call.rows * call.heads, splits = num_splits(units);
  const Shares shares(call.queries, choice.num_units, split_length(units), choice.rest);
  const int64_t size = Chooser::size(choice, shares);
  // One thread is done with a pair before it begins the next, and finds the same memory in its cache.
  const int64_t apart = call.num_threads > 1 ? size : 0;
  const std::unique_ptr<float[]> memory(new float[(pairs - 1) * apart + size]);
  std::vector<std::atomic<int64_t>> done(pairs);
  std::vector<int64_t> taken(pairs);

#pragma omp parallel num_threads(call.num_threads) if (call.num_threads > 1)
  {
    Chooser chooser(choice, estimates);
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < pairs * splits; ++item) {
      const int64_t pair = item / splits;
      const Shares own = shares.at(memory.get() + pair * apart);
      chooser.score(pair, item % splits, own);
      if (done[pair].fetch_add(1) + 1 == splits) taken[pair] = chooser.choose(pair, own);
    }
  }
  const int64_t most = given->taken = *std::max_element(taken.begin(), taken.end()), room = choice.count;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    std::fill(choice.ids + pair * room + taken[pair], choice.ids + pair * room + most, 0);
    std::fill(choice.slots + pair * room + taken[pair], choice.slots + pair * room + most, -1);
  }
}

extern "C" void hf_kvcache_decode(const Call* given);

// Choose, and attend to what is read.
EXPORT void hf_kvcache_read(Choice* choice) {
  hf_kvcache_choose(choice);
  choice->attention->segments[chosen_index(*choice)].length = choice->taken * choice->unit;
  hf_kvcache_decode(choice->attention);
}

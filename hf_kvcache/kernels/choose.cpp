// Which units of tokens a step reads: estimated scores of all, shares of the attention, and the largest of them.
//
// Each row, KV head and split of the units is scored alone; who finishes the last split of a pair chooses for it.
#include <atomic>
#include <memory>

#include "estimates.h"
#include "queries.h"
#include "select.h"
#include "split.h"

namespace {

class Chooser {
 public:
  Chooser(const Choice& choice, int64_t pair, float* scores, Scratch& scratch, Queries& queries)
      : choice(choice), call(*choice.attention), pair(pair), b(pair / call.heads), h(pair % call.heads),
        stride(round_up(choice.num_units, kLanes)), scores(scores), powers(choice.scores ? scores + call.queries * stride : scores),
        masses(powers + call.queries * stride),
        scratch(scratch), queries(queries), exact(call.queries, kNone) {}

  // Returns the number of units taken.
  int64_t choose() {
    score_exact();
    hide();
    mass();
    return take();
  }

 private:
  const Choice& choice;
  const Call& call;
  const int64_t pair, b, h, stride;
  float *scores, *powers, *masses;  // [queries][stride], the same or in the same place, [stride]
  Scratch& scratch;
  Queries& queries;
  std::vector<int64_t> hidden;  // units
  std::vector<float> exact;     // log-sum-exp of what is read anyway, for each query
  float most = 0.0f, share = 0.0f;  // the largest mass; the share of what is read anyway

  void score_exact() {
    queries.move_to(call, pair);
    for (int64_t index = 0; index + 1 < call.num_segments; ++index) {
      const Segment& segment = call.segments[index];
      for (int64_t begin = 0; begin < segment.length; begin += split_length(segment)) {
        const int64_t stop = std::min(segment.length, begin + split_length(segment));
        const Matrix seen = Split(call, segment, b, h, begin, stop, scratch)
                                .seen_scores(queries.of(call, index), queries.plain.data());
        for (int64_t m = 0; m < call.queries; ++m) {
          const float highest = std::max(exact[m], highest_of(seen.at(m), seen.stride));
          if (highest == kNone) continue;
          exact[m] = highest + std::log(std::exp(exact[m] - highest) + total_of(seen.at(m), seen.stride, highest));
        }
      }
    }
  }

  static float highest_of(const float* row, int64_t count) {
    Vec highest = splat(kNone);
    for (int64_t i = 0; i < count; i += kLanes) highest = largest(highest, load<Vec>(row + i));
    return largest(highest);
  }

  static float total_of(const float* row, int64_t count, float shift) {
    Vec total{};
    for (int64_t i = 0; i < count; i += kLanes) total += exp_negative(load<Vec>(row + i) - shift);
    return sum(total);
  }

  // Units that must not be chosen: of sinks, and those of which nothing is seen. And what fills the last vector.
  void hide() {
    const int64_t slot = choice.first_sink ? choice.first_sink[b] : 0, unit = choice.unit, end = slot + choice.num_sinks;
    const int64_t from = choice.sinks_are_apart ? (slot + unit - 1) / unit : slot / unit;
    const int64_t to = choice.sinks_are_apart ? end / unit : (end + unit - 1) / unit;
    for (int64_t i = from; choice.num_sinks && i < std::min(to, choice.num_units); ++i) hidden.push_back(i);
    for (int64_t i = choice.num_units; i < stride; ++i) hidden.push_back(i);
    for (int64_t i = 0; call.mask && i < choice.num_units; ++i)
      if (!is_seen(i * unit)) hidden.push_back(i);
    for (int64_t m = 0; m < call.queries; ++m)
      for (int64_t i : hidden) scores[m * stride + i] = kNone;
  }

  bool is_seen(int64_t slot) const {
    for (int64_t i = b * call.mask_stride + slot, stop = i + choice.unit; i < stop; ++i)
      if (call.mask_is_additive ? ((const float*)call.mask)[i] > kHidden : ((const uint8_t*)call.mask)[i] != 0)
        return true;
    return false;
  }

  static constexpr float kHidden = std::numeric_limits<float>::lowest() / 2;

  // Shares of the attention by these estimates; -1 for what must not be chosen.
  void mass() {
    std::vector<float> factor(call.queries);
    for (int64_t m = 0; m < call.queries; ++m) {
      float shift = std::max(exact[m], highest_of(scores + m * stride, stride));
      if (shift == kNone) shift = 0.0f;
      const float anyway = exact[m] == kNone ? 0.0f : std::exp(exact[m] - shift);
      const float total = anyway + exponentials(m, shift);
      factor[m] = 1.0f / std::max(choice.is_mean ? total * call.queries : total, std::numeric_limits<float>::min());
      share = choice.is_mean ? share + anyway * factor[m] : std::max(share, anyway * factor[m]);
    }
    Vec highest{};
    for (int64_t i = 0; i < stride; i += kLanes) {
      Vec mass{};
      for (int64_t m = 0; m < call.queries; ++m) {
        const Vec own = load<Vec>(powers + m * stride + i) * factor[m];
        mass = choice.is_mean ? mass + own : largest(mass, own);
      }
      highest = largest(highest, mass);
      store(masses + i, mass);
    }
    for (int64_t i : hidden) masses[i] = -1.0f;
    most = largest(highest);
  }

  // The exponentials of a query's scores less `shift`, and their sum.
  float exponentials(int64_t m, float shift) {
    Vec total{};
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Vec power = exp_negative(load<Vec>(scores + m * stride + i) - shift);
      store(powers + m * stride + i, power);
      total += power;
    }
    return sum(total);
  }

  // Returns the number of units taken.
  int64_t take() {
    const int64_t room = choice.count, wanted = std::min(room, count_from(masses, stride, 0));
    if (!wanted || (choice.top_p && most <= 0.0f)) return 0;
    Threshold threshold;
    if (choice.top_p) {
      const float missing = choice.top_p * (sum_from(masses, stride, 0) + share) - share;
      if (missing <= 0.0f) return 0;
      threshold = reaching_masses(masses, stride, missing, most);
    } else {
      threshold = largest_masses(masses, stride, wanted, most);
    }
    const int64_t per_block = choice.block_units, *blocks = choice.blocks + b * choice.blocks_row;
    int64_t taken = 0, *ids = choice.ids + pair * room, *slots = choice.slots + pair * room, block = 0;
    for (int32_t i : places_between(masses, stride, threshold.least, std::numeric_limits<int32_t>::max())) {
      if (as_bits(masses[i]) == threshold.least && threshold.ties-- <= 0) continue;
      while ((block + 1) * per_block <= i) ++block;
      ids[taken] = blocks[block] * per_block + i - block * per_block;
      if (choice.scores)
        for (int64_t m = 0; m < call.queries; ++m)
          choice.scores[(pair * call.queries + m) * room + taken] = scores[m * stride + i];
      slots[taken++] = i * choice.unit;
    }
    return taken;
  }
};

}  // namespace

extern "C" void hf_kvcache_decode(const Call* given);

// Choose, and attend to what is read.
extern "C" __attribute__((visibility("default"))) void hf_kvcache_read(Choice* given) {
  const Choice& choice = *given;
  const Estimates estimates(choice);
  const Call &attention = *choice.attention, &call = estimates.call;
  const Segment& units = call.segments[0];
  const int64_t pairs = call.rows * call.heads, splits = num_splits(units), stride = round_up(choice.num_units, kLanes);
  // Scores, what comes of them, and masses of all queries together.
  const int64_t size = (call.queries * (choice.scores ? 2 : 1) + 1) * stride;
  const std::unique_ptr<float[]> scores(new float[pairs * size]);
  std::vector<std::atomic<int64_t>> done(pairs);
  std::vector<int64_t> taken(pairs);

#pragma omp parallel num_threads(call.num_threads) if (call.num_threads > 1)
  {
    Scratch scratch(call), exact_scratch(attention);
    Queries queries, exact_queries;
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < pairs * splits; ++item) {
      const int64_t pair = item / splits, begin = item % splits * split_length(units);
      const int64_t stop = std::min(units.length, begin + split_length(units));
      queries.move_to(call, pair);
      const Matrix seen = Split(call, units, pair / call.heads, pair % call.heads, begin, stop, scratch)
                              .seen_scores(queries.of(call, 0), queries.plain.data());
      float* own = scores.get() + pair * size;
      for (int64_t m = 0; m < call.queries; ++m) {
        const float bias = estimates.bias[pair * call.queries + m];
        for (int64_t i = 0; i < stop - begin; ++i) own[m * stride + begin + i] = seen.at(m)[i] + bias;
      }
      if (done[pair].fetch_add(1) + 1 == splits)
        taken[pair] = Chooser(choice, pair, own, exact_scratch, exact_queries).choose();
    }
  }
  const int64_t most = given->taken = *std::max_element(taken.begin(), taken.end()), room = choice.count;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    std::fill(choice.ids + pair * room + taken[pair], choice.ids + pair * room + most, 0);
    std::fill(choice.slots + pair * room + taken[pair], choice.slots + pair * room + most, -1);
  }
  Segment& chosen = choice.attention->segments[attention.num_segments - 1];
  chosen.length = most * choice.unit;
  hf_kvcache_decode(choice.attention);
}

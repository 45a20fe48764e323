// What a step reads anyway, before it chooses what else.
#pragma once
#include "queries.h"
#include "shares.h"
#include "split.h"

// A thread's log-sum-exps of the first segments of a call.
class Exact {
 public:
  Exact(const Call& call, int64_t num_segments)
      : call(call), num_segments(num_segments), scratch(call), logsumexps(call.queries) {}

  // Of a row and KV head, for each query.
  const float* of(int64_t pair) {
    queries.move_to(call, pair);
    std::fill(logsumexps.begin(), logsumexps.end(), kNone);
    for (int64_t index = 0; index < num_segments; ++index) {
      const Segment& segment = call.segments[index];
      for (int64_t begin = 0; begin < segment.length; begin += split_length(segment)) {
        const int64_t stop = std::min(segment.length, begin + split_length(segment));
        add(Split(call, segment, pair / call.heads, pair % call.heads, begin, stop, scratch)
                .seen_scores(queries.of(call, index), queries.plain.data()));
      }
    }
    return logsumexps.data();
  }

 private:
  const Call& call;
  const int64_t num_segments;
  Scratch scratch;
  Queries queries;
  std::vector<float> logsumexps;

  void add(Matrix scores) {
    for (int64_t m = 0; m < call.queries; ++m) {
      const float highest = std::max(logsumexps[m], highest_of(scores.at(m), scores.stride));
      if (highest == kNone) continue;
      const float total = exponentials(scores.at(m), scores.stride, highest, scores.at(m));
      logsumexps[m] = highest + std::log(std::exp(logsumexps[m] - highest) + total);
    }
  }
};

// The queries that units are estimated with, as `Estimate` says, and the call that scores the units.
#pragma once
#include <vector>

#include "queries.h"

class Estimates {
 public:
  Estimates(const Estimate& estimate, const Call& attention, int64_t num_units)
      : estimate(estimate), attention(attention), call(attention) {
    segment.key = estimate.key;
    if (estimate.rounds) segment.key.rotation = nullptr;  // queries are rotated here
    segment.ids = estimate.ids;
    segment.ids_row = estimate.ids_row;
    segment.unit = segment.group_length = estimate.per_slot;
    segment.length = num_units;
    segment.stop = std::numeric_limits<int64_t>::max();
    const int64_t pairs = call.rows * call.heads, dim = attention.segments[0].key.dim;
    query.resize(pairs * call.queries * segment.key.dim);
    bias.resize(pairs * call.queries, estimate.added);
    for (int64_t i = 0; i < pairs * call.queries; ++i) {
      const float* own = attention.query + i * dim;
      if (estimate.mean) bias[i] += attention.scaling * dot_product(own, estimate.mean + i / call.queries * dim, dim);
      prepare(own, estimate.query ? estimate.query + i * segment.key.dim : nullptr, query.data() + i * segment.key.dim);
    }
    call.query = query.data();
    call.scaling = 1.0f;
    call.mask = nullptr;
    call.num_sinks = 0;
    call.segments = &segment;
    call.num_segments = 1;
  }

 private:
  void prepare(const float* own, const float* given, float* out) const {
    const int64_t dim = segment.key.dim;
    const float scaling = attention.scaling;
    if (given) {
      std::copy_n(given, dim, out);
    } else if (estimate.has_bounds) {
      for (int64_t c = 0; c < dim / 2; ++c) {
        const float middle = own[c] * scaling / 2, reach = std::abs(middle) * estimate.spread;
        out[c] = middle + reach;
        out[c + dim / 2] = middle - reach;
      }
    } else if (estimate.rounds && estimate.key.rotation) {
      rotate(own, estimate.key.rotation, 1, dim, true, out);
      for (int64_t c = 0; c < dim; ++c) out[c] *= scaling;
    } else {
      for (int64_t c = 0; c < dim; ++c) out[c] = own[c] * scaling;
    }
    if (estimate.rounds) round_to_bytes(out, dim);
  }

  static void round_to_bytes(float* query, int64_t dim) {
    float most = 0.0f;
    for (int64_t c = 0; c < dim; ++c) most = std::max(most, std::abs(query[c]));
    const float step = std::max(most, 1e-30f) / 127.0f;
    for (int64_t c = 0; c < dim; ++c) query[c] = std::nearbyint(query[c] / step) * step;
  }

  const Estimate& estimate;
  const Call& attention;
  Segment segment{};
  std::vector<float> query;

 public:
  Call call;
  std::vector<float> bias;  // [rows, heads, queries]
};

// Attention of one new token over keys and values as they are stored.
//
// Each row, KV head and split of the tokens is attended to alone; the results are merged by their log-sum-exp.
#include <atomic>
#include <memory>

#include "queries.h"
#include "split.h"

namespace {

// One softmax over all splits of one row and KV head: `outputs` [splits][queries][dim], `logsumexps` [splits][queries].
void merge(const Call& call, const float* outputs, float* logsumexps, int64_t splits, float* merged) {
  const int64_t queries = call.queries, dim = call.segments[0].value.dim, size = queries * dim;
  for (int64_t m = 0; m < queries; ++m) {
    float most = kNone, total = 0.0f;
    for (int64_t i = 0; i < splits; ++i) most = std::max(most, logsumexps[i * queries + m]);
    for (int64_t i = 0; i < splits; ++i) {
      float& weight = logsumexps[i * queries + m];
      weight = weight == kNone ? 0.0f : std::exp(weight - most);
      total += weight;
    }
    for (int64_t i = 0; i < splits && total > 0.0f; ++i) logsumexps[i * queries + m] /= total;
  }
  std::fill_n(merged, size, 0.0f);
  std::vector<float> mixed(size), turned(size);
  for (int64_t index = 0; index < call.num_segments; ++index) {
    const Segment& segment = call.segments[index];
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int64_t i = num_splits(segment); i; --i, outputs += size, logsumexps += queries)
      for (int64_t j = 0; j < size; ++j) mixed[j] += logsumexps[j / dim] * outputs[j];
    const float* rotation = segment.value.rotation;
    if (rotation) rotate(mixed.data(), rotation, queries, dim, false, turned.data());
    for (int64_t j = 0; j < size; ++j) merged[j] += rotation ? turned[j] : mixed[j];
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void hf_kvcache_decode(const Call* given) {
  const Call& call = *given;
  const int64_t pairs = call.rows * call.heads, size = call.queries * call.segments[0].value.dim;
  int64_t splits = 0;
  for (int64_t i = 0; i < call.num_segments; ++i) splits += num_splits(call.segments[i]);
  const std::unique_ptr<float[]> outputs(new float[pairs * splits * size]);  // of each split, all written below
  std::vector<float> logsumexps(pairs * splits * call.queries);
  std::vector<std::atomic<int64_t>> done(pairs);

#pragma omp parallel num_threads(call.num_threads) if (call.num_threads > 1)
  {
    Scratch scratch(call);
    Queries queries;
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < pairs * splits; ++item) {
      const int64_t pair = item / splits;
      int64_t index = 0, split = item % splits;
      while (split >= num_splits(call.segments[index])) split -= num_splits(call.segments[index++]);
      const Segment& segment = call.segments[index];
      const int64_t length = segment.lengths ? segment.lengths[pair] : segment.length;
      const int64_t begin = split * split_length(segment), stop = std::min(length, begin + split_length(segment));
      float *output = outputs.get() + item * size, *logsumexp = logsumexps.data() + item * call.queries;
      if (begin < stop) {
        queries.move_to(call, pair);
        Split(call, segment, pair / call.heads, pair % call.heads, begin, stop, scratch)
            .attend(queries.of(call, index), queries.plain.data(), output, logsumexp);
      } else {
        std::fill_n(output, size, 0.0f);
        std::fill_n(logsumexp, call.queries, kNone);
      }
      // Who finishes the last split of a row and head merges them: threads wait for each other once, at the end.
      if (done[pair].fetch_add(1) + 1 == splits)
        merge(call, outputs.get() + pair * splits * size, logsumexps.data() + pair * splits * call.queries, splits,
              call.output + pair * size);
    }
  }
}

// Attention of the queries of one row and KV head over a split of the tokens.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "call.h"
#include "products.h"

constexpr int kSplit = 512;  // tokens of a split, as near as groups allow
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What a thread works in.
struct Scratch {
  std::vector<float> scores, weights, query, scale, zero;
  explicit Scratch(const Call& call);
};

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

inline int64_t split_length(const Segment& segment) {
  return segment.ids ? std::max<int64_t>(1, kSplit / segment.group_length) * segment.group_length : kSplit;
}

inline int64_t num_splits(const Segment& segment) {
  return (segment.length + split_length(segment) - 1) / split_length(segment);
}

inline Scratch::Scratch(const Call& call) {
  int64_t tokens = 0, floats = 0, dim = 0;
  for (int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& segment = call.segments[i];
    tokens = std::max(tokens, round_up(split_length(segment), kLanes));
    dim = std::max<int64_t>({dim, segment.key.dim, segment.value.dim});
    floats = std::max({floats, dim, segment.ids ? segment.group_length : 0});
  }
  scores.resize(call.queries * tokens);
  weights.resize(call.queries * tokens);
  query.resize(call.queries * dim);
  scale.resize(round_up(floats, kLanes));
  zero.resize(round_up(floats, kLanes));
}

// float16 to float, `count` rounded up to whole vectors.
inline void widen_all(const uint8_t* halves, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) store(out + i, widen_float16(load<HalfVec>(halves + 2 * i)));
}

// `halves[t][block]` of `count` tokens, the others left out.
inline void widen_block(const uint8_t* halves, int count, int blocks, int block, float* out) {
  if (blocks == 1) return widen_all(halves, count, out);
  for (int t = 0; t < count; ++t) out[t] = widen_float16(((const uint16_t*)halves)[t * blocks + block]);
}

inline float dot_product(const float* a, const float* b, int64_t count) {
  Vec total{};
  for (int64_t i = 0; i < count; i += kLanes) total += load<Vec>(a + i) * load<Vec>(b + i);
  return sum(total);
}

alignas(64) inline constexpr float kNoTable[kLanes] = {};

inline Group group_at(const Store& store, int64_t b, int64_t h, int64_t id, int64_t first, int length) {
  return {store.codes.at(b, h, id) + first * store.stride, store.high.at(b, h, id), store.stride, store.high_stride,
          store.table ? store.table : kNoTable, length, store.bits};
}

// `product` for any number of queries.
inline void in_turns(const Product* product, const Group& group, int count, int first, int length, int64_t queries,
                     Matrix in, Matrix out) {
  for (int64_t m = 0; m < queries; m += kMaxQueries) {
    const int taken = (int)std::min<int64_t>(kMaxQueries, queries - m);
    product[taken - 1](group, count, first, length, {in.at(m), in.stride}, {out.at(m), out.stride});
  }
}

// A part of the tokens of one row and KV head: all of them in one group, or whole groups.
class Split {
 public:
  Split(const Call& call, const Segment& segment, int64_t b, int64_t h, int64_t begin, int64_t stop, Scratch& scratch)
      : call(call), segment(segment), b(b), h(h), begin(begin), stop(stop), scratch(scratch) {
    const int64_t stride = round_up(stop - begin, kLanes);
    scores = {scratch.scores.data(), stride};
    weights = {scratch.weights.data(), stride};
  }

  // `query` and `plain` are the scaled queries [queries][dim], rotated as the keys are and not.
  // Writes [queries][value dim] to `output`, and the log-sum-exps.
  void attend(const float* query, const float* plain, float* output, float* logsumexp) {
    each_group([&](int64_t id, int64_t first, int count) { score_group(query, plain, id, first, count); });
    hide();
    for (int64_t m = 0; m < call.queries; ++m) logsumexp[m] = softmax(scores.at(m));
    std::fill_n(output, call.queries * segment.value.dim, 0.0f);
    each_group([&](int64_t id, int64_t first, int count) { mix_group(output, id, first, count); });
  }

 private:
  const Call& call;
  const Segment& segment;
  const int64_t b, h, begin, stop;
  Scratch& scratch;
  Matrix scores, weights;

  template <class Run>
  void each_group(Run run) {
    if (!segment.ids) return run(0, begin, (int)(stop - begin));
    // The last group may be filled in part: nothing is read behind its tokens.
    for (int64_t t = begin; t < stop; t += segment.group_length)
      run(segment.ids[b * segment.ids_stride + t / segment.group_length], t,
          (int)std::min(segment.group_length, stop - t));
  }

  void score_group(const float* query, const float* plain, int64_t id, int64_t first, int count) {
    const Store& key = segment.key;
    const Matrix out{scores.data + (first - begin), scores.stride};
    if (key.is_columns) {
      score_columns(query, id, count, out);
    } else {
      score_rows(query, id, first, count, out);
    }
    if (const uint8_t* halves = key.mean.at(b, h, id)) {
      widen_all(halves, key.dim, scratch.zero.data());
      for (int64_t m = 0; m < call.queries; ++m)
        add(out.at(m), count, dot_product(plain + m * key.dim, scratch.zero.data(), key.dim));
    }
  }

  void score_columns(const float* query, int64_t id, int count, Matrix out) {
    const Store& key = segment.key;
    float *scale = scratch.scale.data(), *zero = scratch.zero.data();
    widen_all(key.scale.at(b, h, id), key.dim, scale);
    widen_all(key.zero.at(b, h, id), key.dim, zero);
    const Matrix scaled{scratch.query.data(), key.dim};
    for (int64_t m = 0; m < call.queries; ++m)
      for (int c = 0; c < key.dim; ++c) scaled.at(m)[c] = query[m * key.dim + c] * scale[c];
    const Group group = group_at(key, b, h, id, 0, (int)segment.group_length);
    const Products& products = products_for((Form)key.form, group.length, key.bits);
    in_turns(products.dot_columns, group, count, 0, key.dim, call.queries, scaled, out);
    for (int64_t m = 0; m < call.queries; ++m) add(out.at(m), count, dot_product(query + m * key.dim, zero, key.dim));
  }

  void score_rows(const float* query, int64_t id, int64_t first, int count, Matrix out) {
    const Store& key = segment.key;
    const Matrix in{const_cast<float*>(query), key.dim};
    const Group group = group_at(key, b, h, id, segment.ids ? 0 : first, key.dim);
    const Product* dot = products_for((Form)key.form, key.dim, key.bits).dot;
    const uint8_t* halves = key.scale.at(b, h, id);
    if (!halves) return in_turns(dot, group, count, 0, key.dim, call.queries, in, out);
    const int blocks = key.dim / key.block;
    for (int block = 0; block < blocks; ++block) {
      widen_block(halves, count, blocks, block, scratch.scale.data());
      // The first block is written in place, the others beside and added: `weights` is not in use yet.
      const Matrix part = block ? weights : out;
      in_turns(dot, group, count, block * key.block, key.block, call.queries, in, part);
      for (int64_t m = 0; m < call.queries; ++m)
        for (int t = 0; t < count; t += kLanes) {
          const Vec score = load<Vec>(part.at(m) + t) * load<Vec>(scratch.scale.data() + t);
          store(out.at(m) + t, block ? load<Vec>(out.at(m) + t) + score : score);
        }
    }
  }

  static void add(float* to, int count, float value) {
    for (int i = 0; i < count; ++i) to[i] += value;
  }

  void hide() {
    const int64_t slot = (segment.first_slot ? segment.first_slot[b] : segment.slot) + begin;
    const int64_t count = stop - begin, seen = std::clamp<int64_t>(segment.stop - slot, 0, count);
    for (int64_t m = 0; m < call.queries; ++m) {
      float* row = scores.at(m);
      if (call.mask && call.mask_is_additive) {
        const float* mask = (const float*)call.mask + b * call.mask_stride + slot;
        for (int64_t i = 0; i < seen; ++i) row[i] += mask[i];
      } else if (call.mask) {
        const uint8_t* mask = (const uint8_t*)call.mask + b * call.mask_stride + slot;
        for (int64_t i = 0; i < seen; ++i) row[i] = mask[i] ? row[i] : kNone;
      }
      std::fill(row + seen, row + scores.stride, kNone);
      if (segment.hides_sinks && call.num_sinks) {
        const int64_t first = std::clamp<int64_t>(call.sinks[b] - slot, 0, count);
        const int64_t last = std::clamp<int64_t>(call.sinks[b] + call.num_sinks - slot, 0, count);
        std::fill(row + first, row + last, kNone);
      }
    }
  }

  // In place; returns the log-sum-exp. A row that sees nothing gets weights of 0.
  float softmax(float* row) const {
    Vec most = load<Vec>(row);
    for (int64_t i = kLanes; i < scores.stride; i += kLanes) {
      const Vec next = load<Vec>(row + i);
      most = next > most ? next : most;
    }
    const float shift = largest(most);
    if (shift == kNone) {
      std::fill_n(row, scores.stride, 0.0f);
      return kNone;
    }
    Vec total{};
    for (int64_t i = 0; i < scores.stride; i += kLanes) {
      const Vec weight = exp_negative(load<Vec>(row + i) - shift);
      store(row + i, weight);
      total += weight;
    }
    const float norm = 1.0f / sum(total);
    for (int64_t i = 0; i < scores.stride; ++i) row[i] *= norm;
    return shift - std::log(norm);
  }

  void mix_group(float* output, int64_t id, int64_t first, int count) {
    const Store& value = segment.value;
    const Matrix in{scores.data + (first - begin), scores.stride}, out{output, value.dim};
    const Group group = group_at(value, b, h, id, segment.ids ? 0 : first, value.dim);
    const Product* mix = products_for((Form)value.form, value.dim, value.bits).mix;
    const uint8_t *scales = value.scale.at(b, h, id), *zeros = value.zero.at(b, h, id);
    if (!scales) return in_turns(mix, group, count, 0, value.dim, call.queries, in, out);
    const int blocks = value.dim / value.block;
    const float *scale = scratch.scale.data(), *zero = scratch.zero.data();
    for (int block = 0; block < blocks; ++block) {
      const int from = block * value.block;
      widen_block(scales, count, blocks, block, scratch.scale.data());
      if (zeros) widen_block(zeros, count, blocks, block, scratch.zero.data());
      for (int64_t m = 0; m < call.queries; ++m) {
        const float* weight = in.at(m);
        for (int t = 0; t < count; t += kLanes) store(weights.at(m) + t, load<Vec>(weight + t) * load<Vec>(scale + t));
        if (zeros) add(out.at(m) + from, value.block, dot_product(weight, zero, count));
      }
      in_turns(mix, group, count, from, value.block, call.queries, weights, out);
    }
  }
};

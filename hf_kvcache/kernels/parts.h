// What a split of the tokens is made of: its parts, the groups they lie in, and what a thread works in.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "call.h"
#include "products.h"

constexpr int kSplit = 512;  // tokens of a split, as near as units allow
constexpr int kIndexSplit = 2048;  // the same where a token is a few bytes
constexpr float kNone = -std::numeric_limits<float>::infinity();

// What a thread works in.
struct Scratch {
  std::vector<float> scores, weights, query, scale, zero;
  std::vector<int64_t> places;
  explicit Scratch(const Call& call);
};

inline int64_t split_length(const Segment& segment) {
  const int64_t tokens = segment.key.form == kIndex ? kIndexSplit : kSplit;
  return segment.ids ? std::max<int64_t>(1, tokens / segment.unit) * segment.unit : tokens;
}

inline int64_t num_splits(const Segment& segment) {
  return (segment.length + split_length(segment) - 1) / split_length(segment);
}

// Floats of a row of scores: the last unit of a split may write a vector from anywhere.
inline int64_t score_stride(int64_t tokens) { return round_up(tokens, kLanes) + kLanes; }

inline Scratch::Scratch(const Call& call) {
  int64_t tokens = 0, floats = 0, dim = 0;
  for (int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& segment = call.segments[i];
    tokens = std::max(tokens, score_stride(split_length(segment)));
    dim = std::max<int64_t>({dim, segment.key.dim, segment.value.dim});
    floats = std::max({floats, dim, segment.ids ? split_length(segment) : 0});
  }
  scores.resize(call.queries * tokens);
  weights.resize(call.queries * tokens);
  query.resize(call.queries * dim);
  scale.resize(round_up(floats, kLanes));
  zero.resize(round_up(floats, kLanes));
  places.resize(tokens);
}

// float16 to float, and zeros up to a whole vector.
inline void widen_all(const uint8_t* halves, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, widen_float16(load<HalfVec>(halves + 2 * i)));
  if (i == count) return;
  HalfVec rest{};
  std::memcpy(&rest, halves + 2 * i, 2 * (count - i));
  store(out + i, widen_float16(rest));
}

// `halves[t][block]` of `count` tokens, the others left out.
inline void widen_block(const uint8_t* halves, int count, int blocks, int block, float* out) {
  if (blocks == 1) return widen_all(halves, count, out);
  for (int t = 0; t < count; ++t) out[t] = widen_float16(((const uint16_t*)halves)[t * blocks + block]);
  std::fill(out + count, out + round_up(count, kLanes), 0.0f);
}

inline float dot_product(const float* a, const float* b, int64_t count) {
  Vec total{};
  for (int64_t i = 0; i < count; i += kLanes) total += load<Vec>(a + i) * load<Vec>(b + i);
  return sum(total);
}

alignas(64) inline constexpr float kNoTable[kLanes] = {};

inline Group group_at(const Store& store, int64_t b, int64_t h, int64_t id, int64_t first, int length,
                      const int64_t* places) {
  return {store.codes.at(b, h, id) + first * store.stride, store.high.at(b, h, id) + first * store.high_stride,
          store.stride, store.high_stride, store.table ? store.table : kNoTable, length, store.bits, places};
}

// Whether the tokens of two units whose ids follow each other lie one after the other, and are stored alike.
inline bool is_joined(const Store& store, int64_t unit) {
  const int64_t scales = store.scale.data ? store.dim / store.block * 2 : 0;
  return !store.is_columns && !store.high.data && !store.zero.data && !store.mean.data &&
         store.codes.group == unit * store.stride && store.scale.group == unit * scales;
}

// `product` for any number of queries.
inline void in_turns(const Product* product, const Group& group, int count, int first, int length, int64_t queries,
                     Matrix in, Matrix out) {
  for (int64_t m = 0; m < queries; m += kMaxQueries) {
    const int taken = (int)std::min<int64_t>(kMaxQueries, queries - m);
    product[taken - 1](group, count, first, length, {in.at(m), in.stride}, {out.at(m), out.stride});
  }
}

// Tokens of one group, or of rows at `places` of a plane.
struct Part {
  int64_t id, first, offset;  // the group; its first token here; where the tokens begin in the split
  int count;
  const int64_t* places;
};

// Attention of the queries of one row and KV head over a split of the tokens.
#pragma once
#include "parts.h"

// A part of the tokens of one row and KV head: in order, or whole units.
class Split {
 public:
  Split(const Call& call, const Segment& segment, int64_t b, int64_t h, int64_t begin, int64_t stop, Scratch& scratch)
      : call(call), segment(segment), b(b), h(h), begin(begin), stop(stop), scratch(scratch) {
    const int64_t stride = score_stride(stop - begin);
    scores = {scratch.scores.data(), stride};
    weights = {scratch.weights.data(), stride};
  }

  // `query` and `plain` are the scaled queries [queries][dim], rotated as the keys are and not.
  // Writes [queries][value dim] to `output`, and the log-sum-exps.
  void attend(const float* query, const float* plain, float* output, float* logsumexp) {
    if (!segment.scores) fetch(segment.key);
    score(query, plain);
    fetch(segment.value);
    hide();
    for (int64_t m = 0; m < call.queries; ++m) logsumexp[m] = softmax(scores.at(m));
    std::fill_n(output, call.queries * segment.value.dim, 0.0f);
    each_part([&](const Part& part) { mix_part(output, part); });
  }

  // Scores of what the queries see, and -inf; `at(m)[i]` for token `begin + i`.
  Matrix seen_scores(const float* query, const float* plain) {
    score(query, plain);
    hide();
    return scores;
  }

 private:
  const Call& call;
  const Segment& segment;
  const int64_t b, h, begin, stop;
  Scratch& scratch;
  Matrix scores, weights;

  template <class Run>
  void each_part(Run run) {
    const int64_t unit = segment.unit, per_group = segment.ids ? segment.group_length / unit : 1;
    const int64_t *ids = segment.of(segment.ids, b, h), length = stop - begin;
    if (!ids) return run({0, begin, 0, (int)length, nullptr});
    ids += begin / unit;
    if (is_by_row()) return run({0, 0, 0, (int)length, places(ids)});
    const bool joins = per_group == 1 && units_are_joined();
    // The last unit may be filled in part: nothing is read behind its tokens.
    for (int64_t i = 0, next; i * unit < length; i = next) {
      next = i + 1;
      while (joins && next * unit < length && ids[next] == ids[next - 1] + 1) ++next;
      const int64_t count = std::min(next * unit, length) - i * unit;
      run({ids[i] / per_group, ids[i] % per_group * unit, i * unit, (int)count, nullptr});
    }
  }

  bool units_are_joined() const {
    return is_joined(segment.key, segment.unit) &&
           (!segment.value.codes.data || is_joined(segment.value, segment.unit));
  }

  // Units of less than a vector of tokens are taken a token at a time, if these are as they are.
  bool is_by_row() const {
    const int64_t unit = segment.unit;
    return segment.ids && segment.group_length == unit && unit < kLanes && (unit == 1 || segment.ids_head) &&
           units_are_joined() && !segment.key.scale.data && !segment.value.scale.data && segment.key.form != kIndex;
  }

  // Where the tokens of the units lie, in units of a token.
  const int64_t* places(const int64_t* ids) {
    const int64_t unit = segment.unit, length = stop - begin;
    if (unit == 1) return ids;
    int64_t* to = scratch.places.data();
    for (int64_t i = 0; i < length; i += unit, ++ids)
      for (int64_t t = 0; t < std::min(unit, length - i); ++t) to[i + t] = *ids * unit + t;
    return to;
  }

  // Units that a head has chosen lie anywhere: no CPU foresees where. Loads that nothing waits for are under way side by
  // side. (Products fetch rows at places as they go.)
  void fetch(const Store& store) const {
    if (!segment.ids || !segment.ids_head || is_by_row()) return;
    const int64_t *ids = segment.of(segment.ids, b, h), per_group = segment.group_length / segment.unit;
    const int64_t size = (store.is_columns ? store.dim : segment.unit) * store.stride;
    for (int64_t i = begin / segment.unit; i * segment.unit < stop; ++i) {
      const int64_t first = store.is_columns ? 0 : ids[i] % per_group * segment.unit;
      const uintptr_t from = (uintptr_t)(store.codes.at(b, h, ids[i] / per_group) + first * store.stride);
      for (uintptr_t line = from / kLine * kLine; line < from + size; line += kLine)
        __builtin_prefetch((const void*)line, 0, 2);  // into the second cache: there is room for a split
    }
    asm volatile("");  // or a compiler would take the call for one without effect
  }

  void score(const float* query, const float* plain) {
    if (!segment.scores) return each_part([&](const Part& part) { score_part(query, plain, part); });
    const float* known = segment.scores + (b * call.heads + h) * call.queries * segment.scores_row + begin;
    for (int64_t m = 0; m < call.queries; ++m) std::copy_n(known + m * segment.scores_row, stop - begin, scores.at(m));
  }

  void score_part(const float* query, const float* plain, const Part& part) {
    const Store& key = segment.key;
    const Matrix out{scores.data + part.offset, scores.stride};
    if (key.is_columns) {
      score_columns(query, part, out);
    } else {
      score_rows(query, part, out);
    }
    if (const uint8_t* halves = key.mean.at(b, h, part.id)) {
      widen_all(halves, key.dim, scratch.zero.data());
      for (int64_t m = 0; m < call.queries; ++m)
        add(out.at(m), part.count, dot_product(plain + m * key.dim, scratch.zero.data(), key.dim));
    }
  }

  void score_columns(const float* query, const Part& part, Matrix out) {
    const Store& key = segment.key;
    float *scale = scratch.scale.data(), *zero = scratch.zero.data();
    widen_all(key.scale.at(b, h, part.id), key.dim, scale);
    widen_all(key.zero.at(b, h, part.id), key.dim, zero);
    const Matrix scaled{scratch.query.data(), key.dim};
    for (int64_t m = 0; m < call.queries; ++m)
      for (int c = 0; c < key.dim; ++c) scaled.at(m)[c] = query[m * key.dim + c] * scale[c];
    const Group group = group_at(key, b, h, part.id, 0, (int)segment.group_length, nullptr);
    const Products& products = products_for((Form)key.form, group.length, key.bits);
    // Vectors of tokens lie at multiples of their length: what does not begin at one is taken from a longer product.
    const int lead = (int)(part.first % kLanes), count = part.count + lead;
    const Matrix whole = lead || count % kLanes ? weights : out;  // `weights` is not in use yet
    in_turns(products.dot_columns, group, count, (int)part.first - lead, key.dim, call.queries, scaled, whole);
    for (int64_t m = 0; m < call.queries && whole.data != out.data; ++m)
      std::copy_n(whole.at(m) + lead, part.count, out.at(m));
    for (int64_t m = 0; m < call.queries; ++m)
      add(out.at(m), part.count, dot_product(query + m * key.dim, zero, key.dim));
  }

  void score_rows(const float* query, const Part& part, Matrix out) {
    const Store& key = segment.key;
    const Matrix in{const_cast<float*>(query), key.dim};
    const Group group = group_at(key, b, h, part.id, part.first, key.dim, part.places);
    const Product* dot = products_for((Form)key.form, key.dim, key.bits).dot;
    const uint8_t* halves = key.scale.at(b, h, part.id);
    if (!halves) return in_turns(dot, group, part.count, 0, key.dim, call.queries, in, out);
    const int blocks = key.dim / key.block, count = part.count;
    for (int block = 0; block < blocks; ++block) {
      widen_block(halves + 2 * part.first * blocks, count, blocks, block, scratch.scale.data());
      // The first block is written in place, the others beside and added: `weights` is not in use yet.
      const Matrix beside = block ? weights : out;
      in_turns(dot, group, count, block * key.block, key.block, call.queries, in, beside);
      for (int64_t m = 0; m < call.queries; ++m)
        for (int t = 0; t < count; t += kLanes) {
          const Vec score = load<Vec>(beside.at(m) + t) * load<Vec>(scratch.scale.data() + t);
          store(out.at(m) + t, block ? load<Vec>(out.at(m) + t) + score : score);
        }
    }
  }

  static void add(float* to, int count, float value) {
    for (int i = 0; i < count; ++i) to[i] += value;
  }

  void hide() {
    const int64_t count = stop - begin;
    for (int64_t m = 0; m < call.queries; ++m) std::fill(scores.at(m) + count, scores.at(m) + scores.stride, kNone);
    if (!segment.slots)
      return hide_run(0, (segment.first_slot ? segment.first_slot[b] : segment.slot) + begin, count);
    const int64_t *slots = segment.of(segment.slots, b, h) + begin / segment.unit, unit = segment.unit;
    for (int64_t i = 0; i < count; i += unit) hide_run(i, slots[i / unit], std::min(unit, count - i));
  }

  // The tokens `from` to `from + count` are those of the slots from `slot`.
  void hide_run(int64_t from, int64_t slot, int64_t count) {
    const int64_t seen = slot < 0 ? 0 : std::clamp<int64_t>(segment.stop - slot, 0, count);
    const bool has_sinks = seen && segment.hides_sinks && call.num_sinks;
    const bool is_masked = call.mask && !segment.ignores_mask;
    for (int64_t m = 0; m < call.queries; ++m) {
      float* row = scores.at(m) + from;
      if (is_masked && call.mask_is_additive) {
        const float* mask = (const float*)call.mask + b * call.mask_stride + slot;
        for (int64_t i = 0; i < seen; ++i) row[i] += mask[i];
      } else if (is_masked) {
        const uint8_t* mask = (const uint8_t*)call.mask + b * call.mask_stride + slot;
        for (int64_t i = 0; i < seen; ++i) row[i] = mask[i] ? row[i] : kNone;
      }
      std::fill(row + seen, row + count, kNone);
      if (has_sinks) {
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

  void mix_part(float* output, const Part& part) {
    const Store& value = segment.value;
    const Matrix in{scores.data + part.offset, scores.stride}, out{output, value.dim};
    const Group group = group_at(value, b, h, part.id, part.first, value.dim, part.places);
    const Product* mix = products_for((Form)value.form, value.dim, value.bits).mix;
    const uint8_t *scales = value.scale.at(b, h, part.id), *zeros = value.zero.at(b, h, part.id);
    if (!scales) return in_turns(mix, group, part.count, 0, value.dim, call.queries, in, out);
    const int blocks = value.dim / value.block, count = part.count;
    const int64_t skipped = 2 * part.first * blocks;
    const float *scale = scratch.scale.data(), *zero = scratch.zero.data();
    for (int block = 0; block < blocks; ++block) {
      const int from = block * value.block;
      widen_block(scales + skipped, count, blocks, block, scratch.scale.data());
      if (zeros) widen_block(zeros + skipped, count, blocks, block, scratch.zero.data());
      for (int64_t m = 0; m < call.queries; ++m) {
        const float* weight = in.at(m);
        for (int t = 0; t < count; t += kLanes) store(weights.at(m) + t, load<Vec>(weight + t) * load<Vec>(scale + t));
        if (zeros) add(out.at(m) + from, value.block, dot_product(weight, zero, count));
      }
      in_turns(mix, group, count, from, value.block, call.queries, weights, out);
    }
  }
};

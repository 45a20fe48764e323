// What the kernel is called with. structs.py mirrors these structs.
#pragma once
#include <cstdint>

// A tensor [rows, heads, groups, ...]: its first element, and bytes from one row, head and group to the next.
struct Plane {
  const uint8_t* data;
  int64_t row, head, group;

  const uint8_t* at(int64_t b, int64_t h, int64_t g) const {
    return data ? data + b * row + h * head + g * group : nullptr;
  }
};

// Keys or values: stored[t][c] * scale[t][c / block] + zero[t][c / block], or by the channel with scale[c] and zero[c];
// then times `rotation`, plus mean[c]. Rows of codes lie `stride` bytes apart, those of third bits `high_stride`.
struct Store {
  int32_t form, bits, dim, block, is_columns, unused;
  int64_t stride, high_stride;
  Plane codes, high, scale, zero, mean;
  const float* table;     // [16]
  const float* rotation;  // [dim, dim]
};

// Consecutive tokens. Token `i` of row `b` is slot `first_slot[b] + i` of the mask, and is seen below slot `stop` only.
struct Segment {
  Store key, value;
  const int64_t* ids;  // [rows, groups]: where each group lies, or null: in order
  int64_t ids_stride, group_length, length;
  const int64_t* first_slot;  // [rows], or null: `slot`
  int64_t slot, stop;
  int64_t hides_sinks;
};

struct Call {
  int64_t rows, heads, queries, num_segments, num_threads;
  const Segment* segments;
  const float* query;  // [rows, heads, queries, key dim]
  float scaling;
  int32_t mask_is_additive;
  const void* mask;  // [rows, slots], bytes or floats, or null
  int64_t mask_stride;
  const int64_t* sinks;  // [rows]: first slot of the `num_sinks` tokens that segments with `hides_sinks` leave out
  int64_t num_sinks;
  float* output;  // [rows, heads, queries, value dim]
};

// One group of stored tokens, and the products of queries with it.
#pragma once
#include "formats.h"

constexpr int kMaxQueries = 4;  // a product takes this many at most; more are served in turns
constexpr int kMaxDim = 512;
constexpr uintptr_t kLine = 64;  // bytes of a line of the CPU's caches

// The rows of one group: tokens (keys and values by the token), or channels (keys by the channel).
struct Group {
  const uint8_t* bytes;
  const uint8_t* high;
  int64_t stride, high_stride;  // bytes from a row to the next
  const float* table;           // [16]
  int length, bits;             // of a row: elements, and bits of one
  const int64_t* places;        // which row of `bytes` each row is, or null: in order

  // Rows at places lie anywhere: no CPU foresees where, so they are asked for some rows ahead.
  void fetch(int64_t index) const {
    const uintptr_t from = (uintptr_t)(bytes + places[index] * stride);
    for (uintptr_t line = from / kLine * kLine; line < from + stride; line += kLine) __builtin_prefetch((void*)line);
  }

  Row row(int64_t index, const Table& of) const {
    const int64_t place = places ? places[index] : index;
    return {bytes + place * stride, high + place * high_stride, of};
  }
};

// One float for each query and token, or query and channel: `at(m)[i]`.
struct Matrix {
  float* data;
  int64_t stride;
  float* at(int m) const { return data + m * stride; }
};

// dot: out[m][t] = sum of in[m][c] * group[t][c] over the channels `first` to `first + length`, for `count` tokens `t`.
// dot_columns: the same with a group whose rows are channels, over all `length` of them, for the tokens from `first`.
// mix: out[m][c] += sum of in[m][t] * group[t][c] over `count` tokens, for the channels `first` to `first + length`.
// Whole vectors are written.
using Product = void (*)(const Group&, int count, int first, int length, Matrix in, Matrix out);

struct Products {
  Product dot[kMaxQueries], dot_columns[kMaxQueries], mix[kMaxQueries];
};

// Numbers that structs.py knows too.
enum Form { kFloat32, kBFloat16, kFloat16, kFloat8, kInt8, kCodes, kIndex, kSigned8, kIntegers };

const Products& products_for(Form form, int length, int bits);

// Products of up to four queries with a group of stored tokens, decoded a vector at a time in registers.
#pragma once
#include "formats.h"

constexpr int kMaxQueries = 4;  // a product takes this many at most; more are served in turns
constexpr int kMaxDim = 512;

// Vectors that a product holds for each of M queries: as many as leave registers for the others.
template <int M>
constexpr int kVecs = kLanes == 8 && M == kMaxQueries ? 2 : 4;

// The rows of one group: tokens (keys and values by the token), or channels (keys by the channel).
struct Group {
  const uint8_t* bytes;
  const uint8_t* high;
  int64_t stride, high_stride;  // bytes from a row to the next
  const float* table;           // [16]
  int length, bits;             // of a row: elements, and bits of one

  Row row(int64_t index, const Table& of) const { return {bytes + index * stride, high + index * high_stride, of}; }
};

// One float for each query and token, or query and channel: `at(m)[i]`.
struct Matrix {
  float* data;
  int64_t stride;
  float* at(int m) const { return data + m * stride; }
};

using Product = void (*)(const Group&, int count, int first, int length, Matrix in, Matrix out);

// out[m][t] = sum of in[m][c] * group[t][c] over the channels `first` to `first + length`, for `count` tokens `t`.
// Writes whole vectors of tokens.
template <class F, int M, int V>
void dot_of(const Group& group, int count, int first, int length, Matrix in, Matrix out) {
  using Place = typename F::Place;
  alignas(Place) unsigned char memory[sizeof(Place) * kMaxDim / kLanes];
  Place* places = (Place*)memory;
  const int vecs = length / kLanes;
  for (int v = 0; v < vecs; ++v) new (places + v) Place(first + v * kLanes, group.length, group.bits);
  const Table table = load<Table>(group.table);
  for (int start = 0; start < count; start += kLanes) {
    Vec parts[M][kLanes] = {};
    const int tokens = count - start < kLanes ? count - start : kLanes;
    for (int t = 0; t < tokens; ++t) {
      const Row row = group.row(start + t, table);
      Vec part[M] = {};
      for (int next = 0; next < vecs; next += V)
        for (int v = next; v < next + V; ++v) {
          const Vec keys = F::vec(row, places[v]);
          for (int m = 0; m < M; ++m) part[m] += load<Vec>(in.at(m) + first + v * kLanes) * keys;
        }
      for (int m = 0; m < M; ++m) parts[m][t] = part[m];
    }
    for (int m = 0; m < M; ++m) store(out.at(m) + start, sums(parts[m]));
  }
}

template <class F, int M>
void dot(const Group& group, int count, int first, int length, Matrix in, Matrix out) {
  (length % (kVecs<M> * kLanes) == 0 ? dot_of<F, M, kVecs<M>> : dot_of<F, M, 1>)(group, count, first, length, in, out);
}

// out[m][c] += sum of in[m][t] * group[t][c] over `count` tokens, for the channels `first` to `first + length`.
template <class F, int M, int V>
void mix_of(const Group& group, int count, int first, Matrix in, Matrix out) {
  using Place = typename F::Place;
  alignas(Place) unsigned char memory[sizeof(Place) * V];
  Place* places = (Place*)memory;
  for (int v = 0; v < V; ++v) new (places + v) Place(first + v * kLanes, group.length, group.bits);
  const Table table = load<Table>(group.table);
  Vec mixed[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) mixed[m][v] = load<Vec>(out.at(m) + first + v * kLanes);
  for (int t = 0; t < count; ++t) {
    const Row row = group.row(t, table);
    for (int v = 0; v < V; ++v) {
      const Vec values = F::vec(row, places[v]);
      for (int m = 0; m < M; ++m) mixed[m][v] += in.at(m)[t] * values;
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(out.at(m) + first + v * kLanes, mixed[m][v]);
}

template <class F, int M>
void mix(const Group& group, int count, int first, int length, Matrix in, Matrix out) {
  const int stop = first + length;
  constexpr int step = kVecs<M> * kLanes;
  for (; first + step <= stop; first += step) mix_of<F, M, kVecs<M>>(group, count, first, in, out);
  for (; first < stop; first += kLanes) mix_of<F, M, 1>(group, count, first, in, out);
}

// out[m][t] = sum of in[m][c] * group[c][t] over all `length` channels: the group's rows are channels.
template <class F, int M, int V>
void dot_columns_of(const Group& group, int start, int length, Matrix in, Matrix out) {
  using Place = typename F::Place;
  alignas(Place) unsigned char memory[sizeof(Place) * V];
  Place* places = (Place*)memory;
  for (int v = 0; v < V; ++v) new (places + v) Place(start + v * kLanes, group.length, group.bits);
  const Table table = load<Table>(group.table);
  Vec parts[M][V] = {};
  for (int c = 0; c < length; ++c) {
    const Row row = group.row(c, table);
    for (int v = 0; v < V; ++v) {
      const Vec keys = F::vec(row, places[v]);
      for (int m = 0; m < M; ++m) parts[m][v] += in.at(m)[c] * keys;
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(out.at(m) + start + v * kLanes, parts[m][v]);
}

template <class F, int M>
void dot_columns(const Group& group, int count, int /*first*/, int length, Matrix in, Matrix out) {
  constexpr int step = kVecs<M> * kLanes;
  int start = 0;
  for (; start + step <= count; start += step) dot_columns_of<F, M, kVecs<M>>(group, start, length, in, out);
  for (; start < count; start += kLanes) dot_columns_of<F, M, 1>(group, start, length, in, out);
}

struct Products {
  Product dot[kMaxQueries], dot_columns[kMaxQueries], mix[kMaxQueries];
};

template <class F, bool kHasColumns = false>
constexpr Products products() {
  if constexpr (kHasColumns) {
    return {{dot<F, 1>, dot<F, 2>, dot<F, 3>, dot<F, 4>},
            {dot_columns<F, 1>, dot_columns<F, 2>, dot_columns<F, 3>, dot_columns<F, 4>},
            {mix<F, 1>, mix<F, 2>, mix<F, 3>, mix<F, 4>}};
  } else {
    return {{dot<F, 1>, dot<F, 2>, dot<F, 3>, dot<F, 4>}, {}, {mix<F, 1>, mix<F, 2>, mix<F, 3>, mix<F, 4>}};
  }
}

// Numbers that structs.py knows too.
enum Form { kFloat32, kBFloat16, kFloat16, kFloat8, kInt8, kCodes };

inline const Products& products_for(Form form, int length, int bits) {
  static constexpr Products float32 = products<Dense<Float32>>(), bfloat16 = products<Dense<BFloat16>>();
  static constexpr Products float16 = products<Dense<Float16>>(), float8 = products<Dense<Float8>>();
  static constexpr Products int8 = products<Dense<Int8>, true>(), whole = products<Codes<Whole>, true>();
  static constexpr Products halves = products<Codes<Halves>, true>(), lanes = products<Codes<Lanes>, true>();
  static constexpr Products whole3 = products<Codes3<Whole, Halves>>(), lanes3 = products<Codes3<Lanes, Lanes>>();
  switch (form) {
    case kFloat32: return float32;
    case kBFloat16: return bfloat16;
    case kFloat16: return float16;
    case kFloat8: return float8;
    case kInt8: return int8;
    case kCodes: break;
  }
  // Whole vectors of two bits and half vectors of one, or neither.
  if (bits == 3) return length % (4 * kLanes) == 0 ? whole3 : lanes3;
  const int segment = length * bits / 8;
  return segment % kLanes == 0 ? whole : segment % (kLanes / 2) == 0 ? halves : lanes;
}

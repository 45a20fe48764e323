// Products of up to four queries with a group of stored tokens, decoded a vector at a time in registers.
#include "products.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "bytes.h"

namespace {

// Vectors that a product holds for each of M queries: as many as leave registers for the others.
template <int M>
constexpr int kVecs = kLanes == 8 && M == kMaxQueries ? 2 : 4;

constexpr int kAhead = 16;  // rows that are asked for before they are needed

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
      if (group.places && start + t + kAhead < count) group.fetch(start + t + kAhead);
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
    if (group.places && t + kAhead < count) group.fetch(t + kAhead);
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

template <class F, int M, int V>
void dot_columns_of(const Group& group, int token, int start, int length, Matrix in, Matrix out) {
  using Place = typename F::Place;
  alignas(Place) unsigned char memory[sizeof(Place) * V];
  Place* places = (Place*)memory;
  for (int v = 0; v < V; ++v) new (places + v) Place(token + v * kLanes, group.length, group.bits);
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
void dot_columns(const Group& group, int count, int first, int length, Matrix in, Matrix out) {
  constexpr int step = kVecs<M> * kLanes;
  int start = 0;
  for (; start + step <= count; start += step)
    dot_columns_of<F, M, kVecs<M>>(group, first + start, start, length, in, out);
  for (; start < count; start += kLanes) dot_columns_of<F, M, 1>(group, first + start, start, length, in, out);
}

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

// Codes of an index (readers/index.py, readers/quest.py): whole rows of `4 * Lanes` bytes only, one scale each. A code
// stands for itself less the middle of all codes; queries come in multiples of a 127th of their largest channel.
template <int M, int Bits, int Lanes>
void dot_index_of(const Group& group, int count, Matrix in, Matrix out) {
  constexpr int bytes = 4 * Lanes, segments = 8 / Bits, dim = segments * bytes;  // of a row
  constexpr int wide = sizeof(WideBytes), vecs = bytes > wide ? bytes / wide : 1;  // of a row, if it fills one
  constexpr int parts = Lanes / vecs;  // vectors of `kLanes` rows, when those of each row are added up
  WideBytes factors[M][vecs][segments];
  float scale[M], offset[M];
  for (int m = 0; m < M; ++m) {
    Vec most = splat(1e-30f);
    for (int c = 0; c < dim; c += kLanes) {
      const Vec query = load<Vec>(in.at(m) + c);
      most = largest(most, largest(query, -query));
    }
    scale[m] = largest(most) / 127.0f;
    alignas(64) uint8_t own[dim];
    IntVec sum{};
    for (int c = 0; c < dim; c += kLanes) {
      const Vec rounded = load<Vec>(in.at(m) + c) * (1.0f / scale[m]) + 12582912.0f;  // 1.5 * 2**23: in the low bits
      const IntVec factor = (IntVec)rounded - 0x4B400000;
      const ByteVec narrow = __builtin_convertvector(factor, ByteVec);
      std::memcpy(own + c, &narrow, sizeof(narrow));
      sum += factor;
    }
    offset[m] = ((1 << Bits) - 1) * 0.5f * fold_all(sum);
    for (int s = 0; s < segments; ++s)
      for (int j = 0; j < vecs * wide; ++j) ((uint8_t*)&factors[m][j / wide][s])[j % wide] = own[s * bytes + j % bytes];
  }
  const auto tokens = [&](const uint8_t* rows, float* const* to) {
    IntVec sums[M][parts] = {};
    for (int p = 0; p < parts; ++p)
      for (int v = 0; v < vecs; ++v) {
        const WideBytes packed = load<WideBytes>(rows + (p * vecs + v) * wide);
        WideBytes codes[segments];
        for (int s = 0; s < segments; ++s) codes[s] = pieces<Bits>(packed, Bits * s);
        for (int m = 0; m < M; ++m) sums[m][p] = add_products<segments>(sums[m][p], codes, factors[m][v]);
      }
    for (int m = 0; m < M; ++m)
      store(to[m], (__builtin_convertvector(fold(sums[m], parts), Vec) - offset[m]) * scale[m]);
  };
  float* to[M];
  int start = 0;
  for (; start + kLanes <= count; start += kLanes) {
    for (int m = 0; m < M; ++m) to[m] = out.at(m) + start;
    tokens(group.bytes + (int64_t)start * bytes, to);
  }
  if (start < count) {  // nothing is read behind the last token
    uint8_t rest[kLanes * bytes] = {};
    std::memcpy(rest, group.bytes + (int64_t)start * bytes, (count - start) * bytes);
    for (int m = 0; m < M; ++m) to[m] = out.at(m) + start;
    tokens(rest, to);
  }
}

template <int M, int Bits>
void dot_index(const Group& group, int count, int /*first*/, int length, Matrix in, Matrix out) {
  switch (length * Bits / 32) {
    case 1: return dot_index_of<M, Bits, 1>(group, count, in, out);
    case 2: return dot_index_of<M, Bits, 2>(group, count, in, out);
    case 4: return dot_index_of<M, Bits, 4>(group, count, in, out);
    case 8: return dot_index_of<M, Bits, 8>(group, count, in, out);
    case 16: return dot_index_of<M, Bits, 16>(group, count, in, out);
    case 32: return dot_index_of<M, Bits, 32>(group, count, in, out);
    case 64: return dot_index_of<M, Bits, 64>(group, count, in, out);
  }
}

template <int Bits>
constexpr Products index_products() {
  return {{dot_index<1, Bits>, dot_index<2, Bits>, dot_index<3, Bits>, dot_index<4, Bits>}, {}, {}};
}

}  // namespace

const Products& products_for(Form form, int length, int bits) {
  static constexpr Products float32 = products<Dense<Float32>>(), bfloat16 = products<Dense<BFloat16>>();
  static constexpr Products float16 = products<Dense<Float16>>(), float8 = products<Dense<Float8>>();
  static constexpr Products signed8 = products<Dense<Signed8>>();
  static constexpr Products int8 = products<Dense<Int8>, true>();
  static constexpr Products codes[] = {products<Codes<Whole>, true>(), products<Codes<Halves>, true>(),
                                       products<Codes<Lanes>, true>()};
  static constexpr Products integers[] = {products<Integers<Whole>, true>(), products<Integers<Halves>, true>(),
                                          products<Integers<Lanes>, true>()};
  static constexpr Products whole3 = products<Codes3<Whole, Halves>>(), lanes3 = products<Codes3<Lanes, Lanes>>();
  static constexpr Products index2 = index_products<2>(), index4 = index_products<4>();
  switch (form) {
    case kFloat32: return float32;
    case kBFloat16: return bfloat16;
    case kFloat16: return float16;
    case kFloat8: return float8;
    case kInt8: return int8;
    case kSigned8: return signed8;
    case kIndex: return bits == 4 ? index4 : index2;
    case kCodes:
    case kIntegers: break;
  }
  // Whole vectors of two bits and half vectors of one, or neither.
  if (bits == 3) return length % (4 * kLanes) == 0 ? whole3 : lanes3;
  const int segment = length * bits / 8, fit = segment % kLanes == 0 ? 0 : segment % (kLanes / 2) == 0 ? 1 : 2;
  return (form == kIntegers ? integers : codes)[fit];
}

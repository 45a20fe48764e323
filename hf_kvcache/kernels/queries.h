// The queries of a row and KV head, turned as the keys of each segment are.
#pragma once
#include <vector>

#include "parts.h"

// out[m] = in[m] times `matrix` [dim, dim], or its transpose.
inline void rotate(const float* in, const float* matrix, int64_t queries, int64_t dim, bool transposed, float* out) {
  std::fill_n(out, queries * dim, 0.0f);
  for (int64_t m = 0; m < queries; ++m)
    for (int64_t i = 0; i < dim; ++i) {
      if (transposed) {
        out[m * dim + i] = dot_product(in + m * dim, matrix + i * dim, dim);
      } else {
        for (int64_t j = 0; j < dim; ++j) out[m * dim + j] += in[m * dim + i] * matrix[i * dim + j];
      }
    }
}

// A thread's queries of the row and head it is at: scaled, and turned as the keys of each segment are.
struct Queries {
  std::vector<float> plain, rotated;
  int64_t pair = -1;

  void move_to(const Call& call, int64_t to) {
    if (pair == to) return;
    pair = to;
    const int64_t dim = call.segments[0].key.dim, size = call.queries * dim;
    plain.resize(size);
    rotated.resize(call.num_segments * size);
    for (int64_t i = 0; i < size; ++i) plain[i] = call.query[pair * size + i] * call.scaling;
    for (int64_t i = 0; i < call.num_segments; ++i)
      if (const float* rotation = call.segments[i].key.rotation)
        rotate(plain.data(), rotation, call.queries, dim, true, rotated.data() + i * size);
  }

  const float* of(const Call& call, int64_t segment) const {
    return call.segments[segment].key.rotation ? rotated.data() + segment * plain.size() : plain.data();
  }
};

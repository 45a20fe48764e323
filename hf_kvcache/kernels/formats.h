// The stored forms of a row of elements: of a token's channels, or of a channel's tokens.
//
// A form `F` has `F::Place`, where a vector of elements lies in any row, and `F::vec(row, place)`, their values.
#pragma once
#include "vec.h"

// One row of a stored tensor.
struct Row {
  const uint8_t* bytes;
  const uint8_t* high;  // the third bits of 3-bit codes
  const Table& table;   // the values that codes stand for, repeated to fill it
};

template <class T>
struct Dense {
  struct Place {
    int first;
    Place(int first, int /*length*/, int /*bits*/) : first(first) {}
  };
  static Vec vec(const Row& row, Place place) { return T::widen((const typename T::Element*)row.bytes + place.first); }
};

struct Float32 {
  using Element = float;
  static Vec widen(const float* from) { return load<Vec>(from); }
};

struct BFloat16 {
  using Element = uint16_t;
  static Vec widen(const uint16_t* from) { return widen_bfloat16(load<HalfVec>(from)); }
};

struct Float16 {
  using Element = uint16_t;
  static Vec widen(const uint16_t* from) { return widen_float16(load<HalfVec>(from)); }
};

struct Float8 {
  using Element = uint8_t;
  static Vec widen(const uint8_t* from) { return widen_float8(load<ByteVec>(from)); }
};

struct Int8 {
  using Element = uint8_t;
  static Vec widen(const uint8_t* from) { return __builtin_convertvector(::widen(load<ByteVec>(from)), Vec); }
};

struct Signed8 {
  using Element = uint8_t;
  static Vec widen(const uint8_t* from) { return __builtin_convertvector(widen_signed(load<ByteVec>(from)), Vec); }
};

// Packed codes, as packing.py lays them out: byte `j` of a row holds the codes `j + s * segment`, the first in its low
// bits. Which of the three serves depends on what divides the segment: a vector, half of one, or neither. Bits above a
// code are left in: `look_up` ignores them, or finds the same value for them.
struct Whole {
  int offset, shift;
  Whole(int first, int length, int bits) {
    int segment = length * bits / 8;
    offset = first % segment;
    shift = first / segment * bits;
  }
  IntVec codes(const uint8_t* bytes) const { return widen(load<ByteVec>(bytes + offset)) >> shift; }
};

struct Halves {
  int offsets[2];
  IntVec shifts;
  Halves(int first, int length, int bits) {
    int segment = length * bits / 8;
    for (int i = 0; i < kLanes; ++i) shifts[i] = (first + i) / segment * bits;
    for (int i = 0; i < 2; ++i) offsets[i] = (first + kLanes / 2 * i) % segment;
  }
  IntVec codes(const uint8_t* bytes) const {
    const PairVec both{load<HalfBytes>(bytes + offsets[0]), load<HalfBytes>(bytes + offsets[1])};
    return widen((ByteVec)both) >> shifts;
  }
};

struct Lanes {
  int offsets[kLanes];
  IntVec shifts;
  Lanes(int first, int length, int bits) {
    int segment = length * bits / 8;
    for (int i = 0; i < kLanes; ++i) {
      offsets[i] = (first + i) % segment;
      shifts[i] = (first + i) / segment * bits;
    }
  }
  IntVec codes(const uint8_t* bytes) const {
    IntVec vec;
    for (int i = 0; i < kLanes; ++i) vec[i] = bytes[offsets[i]];
    return vec >> shifts;
  }
};

template <class P>
struct Codes {
  using Place = P;
  static Vec vec(const Row& row, const Place& place) { return look_up(row.table, place.codes(row.bytes)); }
};

// Codes that stand for themselves.
template <class P>
struct Integers {
#if AVX512
  using Place = P;  // a step less than to mask and convert
  static Vec vec(const Row& row, const Place& place) { return look_up(row.table, place.codes(row.bytes)); }
#else
  struct Place {
    P place;
    IntVec mask;
    Place(int first, int length, int bits) : place(first, length, bits), mask(IntVec{} + ((1 << bits) - 1)) {}
  };
  static Vec vec(const Row& row, const Place& of) {
    return __builtin_convertvector(of.place.codes(row.bytes) & of.mask, Vec);
  }
#endif
};

// A plane of the lower two bits and a plane of the third.
template <class Low, class High>
struct Codes3 {
  struct Place {
    Low low;
    High high;
    Place(int first, int length, int /*bits*/) : low(first, length, 2), high(first, length, 1) {}
  };
  static Vec vec(const Row& row, const Place& place) {
    IntVec index = (place.low.codes(row.bytes) & 3) | ((place.high.codes(row.high) & 1) << 2);
    return look_up(row.table, index);
  }
};

// Vectors of floats as wide as the machine's: GCC's and Clang's vector extension, and the steps it has no words for.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define AVX512 1
constexpr int kLanes = 16;
using HalfBytes = uint64_t;  // half a vector of bytes
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX2__) && defined(__F16C__)
#define AVX2 1
constexpr int kLanes = 8;
using HalfBytes = uint32_t;
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#else
constexpr int kLanes = 4;
using HalfBytes = uint16_t;
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
typedef HalfBytes PairVec __attribute__((vector_size(kLanes)));

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

template <class T>
inline T load(const void* from) {
  T vec;
  std::memcpy(&vec, from, sizeof(T));
  return vec;
}

inline void store(float* to, Vec vec) { std::memcpy(to, &vec, sizeof(vec)); }

inline Vec splat(float value) { return Vec{} + value; }

// Unsigned bytes as integers.
inline IntVec widen(ByteVec bytes) {
#if AVX512
  return (IntVec)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif AVX2
  return (IntVec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, IntVec);
#endif
}

// Signed bytes as integers.
inline IntVec widen_signed(ByteVec bytes) {
#if AVX512
  return (IntVec)_mm512_cvtepi8_epi32((__m128i)bytes);
#elif AVX2
  return (IntVec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return ((widen(bytes) ^ 0x80) - 0x80);
#endif
}

// bfloat16 values, given as their bits: the upper halves of floats.
inline Vec widen_bfloat16(HalfVec halves) {
#if AVX512
  return (Vec)((IntVec)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#elif AVX2
  return (Vec)((IntVec)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
  return (Vec)(__builtin_convertvector(halves, IntVec) << 16);
#endif
}

// float16 values, given as their bits. Without hardware: shift the exponent into place and rescale it.
inline Vec widen_float16(HalfVec halves) {
#if AVX512
  return (Vec)_mm512_cvtph_ps((__m256i)halves);
#elif AVX2
  return (Vec)_mm256_cvtph_ps((__m128i)halves);
#else
  const IntVec bits = __builtin_convertvector(halves, IntVec);
  const IntVec is_special = (bits & 0x7c00) == 0x7c00;  // infinity or NaN
  const Vec magnitude = (Vec)((bits & 0x7fff) << 13) * splat(0x1p112f);
  return (Vec)((IntVec)magnitude | ((bits & 0x8000) << 16) | (is_special & 0x7f800000));
#endif
}

inline float widen_float16(uint16_t half) { return widen_float16(HalfVec{half})[0]; }

// e4m3 values: a float16 of 2**-8 times their size has the same bits, shifted.
inline Vec widen_float8(ByteVec bytes) {
#if AVX512
  const HalfVec bits = (HalfVec)_mm256_cvtepu8_epi16((__m128i)bytes);
#elif AVX2
  const HalfVec bits = (HalfVec)_mm_cvtepu8_epi16(_mm_cvtsi64_si128((int64_t)bytes));
#else
  const HalfVec bits = __builtin_convertvector(bytes, HalfVec);
#endif
  return widen_float16(((bits & 0x80) << 8) | ((bits & 0x7f) << 7)) * 256.0f;
}

// 16 floats.
struct Table {
  Vec parts[16 / kLanes];
};

// table[index & 15] in each lane.
inline Vec look_up(const Table& table, IntVec index) {
#if AVX512
  return (Vec)_mm512_permutexvar_ps((__m512i)index, (__m512)table.parts[0]);
#elif AVX2
  const __m256 low = _mm256_permutevar8x32_ps((__m256)table.parts[0], (__m256i)index);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)table.parts[1], (__m256i)index);
  return (Vec)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  float entries[16];
  std::memcpy(entries, &table, sizeof(entries));
  Vec vec;
  for (int i = 0; i < kLanes; ++i) vec[i] = entries[index[i] & 15];
  return vec;
#endif
}

// Sums of neighbours: of `a` in the lower half, of `b` in the upper.
inline Vec add_pairs(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, EVEN_LANES) + __builtin_shufflevector(a, b, ODD_LANES);
#else
  return __builtin_shuffle(a, b, IntVec{EVEN_LANES}) + __builtin_shuffle(a, b, IntVec{ODD_LANES});
#endif
}

// The sum of each of `kLanes` vectors, in a lane of its own. Overwrites them.
inline Vec sums(Vec* vecs) {
#if AVX2
  // Within halves of vectors first: to move numbers between them takes longer.
  const auto add = [](Vec a, Vec b) { return (Vec)_mm256_hadd_ps((__m256)a, (__m256)b); };
  const Vec low = add(add(vecs[0], vecs[1]), add(vecs[2], vecs[3]));
  const Vec high = add(add(vecs[4], vecs[5]), add(vecs[6], vecs[7]));
  return (Vec)_mm256_permute2f128_ps((__m256)low, (__m256)high, 0x20) +
         (Vec)_mm256_permute2f128_ps((__m256)low, (__m256)high, 0x31);
#else
  for (int count = kLanes / 2; count; count /= 2)
    for (int i = 0; i < count; ++i) vecs[i] = add_pairs(vecs[2 * i], vecs[2 * i + 1]);
  return vecs[0];
#endif
}

inline float sum(Vec vec) {
  for (int count = kLanes / 2; count; count /= 2) vec = add_pairs(vec, vec);
  return vec[0];
}

inline IntVec add_pairs(IntVec a, IntVec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, EVEN_LANES) + __builtin_shufflevector(a, b, ODD_LANES);
#else
  return __builtin_shuffle(a, b, IntVec{EVEN_LANES}) + __builtin_shuffle(a, b, IntVec{ODD_LANES});
#endif
}

inline Vec largest(Vec a, Vec b) { return a > b ? a : b; }

#if AVX2
// For each set of lanes, its lanes in order, a byte each.
struct LaneOrders {
  uint64_t of[256];
  constexpr LaneOrders() : of() {
    for (int set = 0; set < 256; ++set)
      for (int lane = 0, next = 0; lane < 8; ++lane)
        if (set >> lane & 1) of[set] |= (uint64_t)lane << 8 * next++;
  }
};
inline constexpr LaneOrders kLaneOrders;
#endif

// Writes `first + lane` for each lane in which a comparison holds, and returns where the next is written. There is room
// for a whole vector.
inline int32_t* store_lanes(int32_t* to, int32_t first, IntVec is_true) {
#if AVX512
  const __mmask16 mask = _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(first))));
  return to + __builtin_popcount(mask);
#elif AVX2
  const int mask = _mm256_movemask_ps((__m256)is_true);
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)kLaneOrders.of[mask]));
  _mm256_storeu_si256((__m256i*)to, _mm256_add_epi32(lanes, _mm256_set1_epi32(first)));
  return to + __builtin_popcount(mask);
#else
  for (int i = 0; i < kLanes; ++i) {  // branches on what is seldom foreseen would take longer
    *to = first + i;
    to -= is_true[i];
  }
  return to;
#endif
}

inline float largest(Vec vec) {
  float most = vec[0];
  for (int i = 1; i < kLanes; ++i) most = vec[i] > most ? vec[i] : most;
  return most;
}

// exp for arguments of at most 0, with an error of less than 2e-7; 0 below -87. As 2 to the power of an integer times
// 2 to the rest of at most a half, for which the polynomial has the smallest largest error (Remez).
inline Vec exp_negative(Vec x) {
  const IntVec in_range = x > -87.0f;
  x = (Vec)((IntVec)x & in_range);
  const Vec rounded = x * 1.44269504f + 12582912.0f;  // 1.5 * 2**23: the integer is in the low bits
  const Vec rest = x * 1.44269504f - (rounded - 12582912.0f);
  Vec poly = splat(1.32764725e-3f);
  for (float factor : {9.67554096e-3f, 5.55071309e-2f, 0.240221202f, 0.693146944f, 1.0f}) poly = poly * rest + factor;
  return (Vec)(((IntVec)poly + ((IntVec)rounded << 23)) & in_range);
}

// Products of 2-bit and 4-bit codes with queries in 8 bits, in integers: four codes meet four channels in one lane.
#pragma once
#include "vec.h"

typedef uint8_t WideBytes __attribute__((vector_size(4 * kLanes)));

// acc[i] += the sum of codes[4i + j] * factors[4i + j]; codes are below 128, factors are signed.
inline IntVec add_products(IntVec acc, WideBytes codes, WideBytes factors) {
#if AVX512 && defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)factors);
#elif AVX512 && defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)factors);
  return acc + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif AVX2
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)factors);
  return acc + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4 * kLanes; ++i) acc[i / 4] += codes[i] * (int8_t)factors[i];
  return acc;
#endif
}

// The `Bits` bits of every byte that lie `shift` bits up. Bytes borrow bits of their neighbours, which the mask takes away.
template <int Bits>
WideBytes pieces(WideBytes bytes, int shift) {
  return (WideBytes)((IntVec)bytes >> shift) & (WideBytes)(IntVec{} + 0x01010101 * ((1 << Bits) - 1));
}

// `count` (a power of two, at most kLanes) vectors of parts, token after token, to one vector of sums a token.
inline IntVec fold(IntVec* parts, int count) {
  for (; count > 1; count /= 2)
    for (int i = 0; i < count / 2; ++i) parts[i] = add_pairs(parts[2 * i], parts[2 * i + 1]);
  return parts[0];
}

inline int fold_all(IntVec parts) {
  int total = 0;
  for (int i = 0; i < kLanes; ++i) total += parts[i];
  return total;
}

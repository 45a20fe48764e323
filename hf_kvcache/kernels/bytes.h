// Products of 2-bit and 4-bit codes with queries in 8 bits, in integers: four codes meet four channels in one lane.
#pragma once
#include "vec.h"

typedef uint8_t WideBytes __attribute__((vector_size(4 * kLanes)));

// acc[i] += the sum of codes[s][4i + j] * factors[s][4i + j]; codes are below 16, factors are signed. There are few enough
// `Segments` (4) for sums of two products each to fit 16 bits.
template <int Segments>
inline IntVec add_products(IntVec acc, const WideBytes* codes, const WideBytes* factors) {
#if AVX512 && defined(__AVX512VNNI__)
  for (int s = 0; s < Segments; ++s) acc = (IntVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes[s], (__m512i)factors[s]);
  return acc;
#elif AVX512 && defined(__AVX512BW__)
  __m512i pairs = _mm512_maddubs_epi16((__m512i)codes[0], (__m512i)factors[0]);
  for (int s = 1; s < Segments; ++s)
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)codes[s], (__m512i)factors[s]));
  return acc + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif AVX2
  __m256i pairs = _mm256_maddubs_epi16((__m256i)codes[0], (__m256i)factors[0]);
  for (int s = 1; s < Segments; ++s)
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[s], (__m256i)factors[s]));
  return acc + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int s = 0; s < Segments; ++s)
    for (int i = 0; i < 4 * kLanes; ++i) acc[i / 4] += codes[s][i] * (int8_t)factors[s][i];
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
#if AVX2
  // Within halves of vectors; of two halves each then has every other token.
  const auto add = [](IntVec a, IntVec b) { return (IntVec)_mm256_hadd_epi32((__m256i)a, (__m256i)b); };
  if (count == 4) {
    const __m256i mixed = (__m256i)add(add(parts[0], parts[1]), add(parts[2], parts[3]));
    return (IntVec)_mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
#endif
  for (; count > 1; count /= 2)
    for (int i = 0; i < count / 2; ++i) parts[i] = add_pairs(parts[2 * i], parts[2 * i + 1]);
  return parts[0];
}

inline int fold_all(IntVec parts) {
  int total = 0;
  for (int i = 0; i < kLanes; ++i) total += parts[i];
  return total;
}

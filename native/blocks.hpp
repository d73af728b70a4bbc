// What the quantisers of a block share: limits, exact means, and codes of a fixed width.
#pragma once
#include <cmath>

#include "common.hpp"

namespace thinwire {

// Larger magnitudes are written as kLargest, so that base + step * level cannot overflow at the receiver. A block whose
// magnitudes are all below kSmallest is written as zeros, because its fixed-point scale would overflow. What was not
// sent stays in the residual either way.
constexpr float kLargest = 0x1p120f;
constexpr float kSmallest = 0x1p-100f;

// Means from sums of integers: exact, so that the order of addition (SIMD lanes, GPUs) does not matter.
struct FixedPoint {
  float scale;
  double unit;
  explicit FixedPoint(float largest) {
    int exponent;
    std::frexp(largest, &exponent);
    scale = std::ldexp(1.0f, 24 - exponent);
    unit = std::ldexp(1.0, exponent - 24);
  }
  int32_t of(float x) const { return int32_t(magnitude(x) * scale); }  // below 2^24
  float mean(int64_t sum, int64_t count) const { return count ? float(double(sum) / double(count) * unit) : 0.0f; }
};

inline float largest_of(const float* v, size_t n) {
  uint32_t bits = 0;
  for (size_t i = 0; i < n; ++i) bits = magnitude_bits(v[i]) > bits ? magnitude_bits(v[i]) : bits;
  return std::bit_cast<float>(bits);
}

template <unsigned Bits>
void pack(const uint8_t* codes, size_t n, uint8_t* out) {
  constexpr size_t per = 8 / Bits;
  size_t i = 0;
  for (; i + per <= n; i += per) {
    unsigned packed = 0;
    for (size_t j = 0; j < per; ++j) packed |= unsigned(codes[i + j]) << (j * Bits);
    *out++ = uint8_t(packed);
  }
  if (i == n) return;
  unsigned packed = 0;
  for (size_t j = 0; i + j < n; ++j) packed |= unsigned(codes[i + j]) << (j * Bits);
  *out = uint8_t(packed);
}

template <unsigned Bits>
void unpack(const uint8_t* in, size_t n, uint8_t* codes) {
  constexpr size_t per = 8 / Bits;
  for (size_t i = 0; i < n; ++i) codes[i] = uint8_t(in[i / per] >> (i % per * Bits) & ((1u << Bits) - 1));
}

template <class T>
T read_as(const uint8_t* in, size_t i) {
  T x;
  std::memcpy(&x, in + i * sizeof(T), sizeof(T));
  return x;
}

}  // namespace thinwire

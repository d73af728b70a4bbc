// Definitions that all kernels share: element types, value formats, counter-based random numbers, half precision.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace thinwire {

using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// Codes that Python passes; they are not part of frames.
enum class Dtype : uint8_t { float32 = 0, float16 = 1, bfloat16 = 2 };

// Codes in a section's header (docs/wire-format.md).
enum class Format : uint8_t {
  float32 = 0,
  float16 = 1,
  bfloat16 = 2,
  bits8 = 3,
  bits4 = 4,
  bits2 = 5,
  sign = 6,
  unary = 7
};
constexpr uint8_t kFormats = 8;

// Entries per block. Each block has its own index coding and its own pair of scales.
constexpr size_t kBlock = 512;

inline float magnitude(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu); }
// Sums are clamped to finite values: a residual must never hold an infinity.
constexpr float kMost = 0x1.fffffep127f;
inline float saturate(float x) { return x > kMost ? kMost : x < -kMost ? -kMost : x; }
inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// splitmix64: turns a counter into 64 random bits.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline float from_bfloat16(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }

inline float from_float16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // A subnormal half is a multiple of 2^-24. No float32 subnormal occurs here, which a thread may be set to flush.
  const uint32_t small = std::bit_cast<uint32_t>(float(int(rest)) * 0x1p-24f);
  return std::bit_cast<float>(sign | (rest < 0x400u ? small : (rest << 13) + 0x38000000u));
}

// Rounds to nearest, ties to even; beyond the largest finite value the result is that value.
inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t rest = bits & 0x7fffffffu;
  rest = (rest + 0x7fffu + ((rest >> 16) & 1u)) >> 16;
  return uint16_t(sign | (rest > 0x7f7fu ? 0x7f7fu : rest));
}

inline uint16_t to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest >= 0x477fe000u) return uint16_t(sign | 0x7bffu);
  if (rest < 0x38800000u) {                                   // below 2^-14: a subnormal, in steps of 2^-24
    const float shifted = std::bit_cast<float>(rest) + 0.5f;  // the addition rounds at 2^-24
    return uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u;
  return uint16_t(sign | (rounded >> 13));
}

template <Dtype D>
struct Load;
template <>
struct Load<Dtype::float32> {
  using type = float;
  static float at(const float* p, size_t i) { return p[i]; }
};
template <>
struct Load<Dtype::float16> {
  using type = uint16_t;
  static float at(const uint16_t* p, size_t i) { return from_float16(p[i]); }
};
template <>
struct Load<Dtype::bfloat16> {
  using type = uint16_t;
  static float at(const uint16_t* p, size_t i) { return from_bfloat16(p[i]); }
};

// Calls f.operator()<D>() with the runtime type as a template argument.
template <class F>
auto with_dtype(Dtype d, F&& f) {
  switch (d) {
    case Dtype::float16: return f.template operator()<Dtype::float16>();
    case Dtype::bfloat16: return f.template operator()<Dtype::bfloat16>();
    default: return f.template operator()<Dtype::float32>();
  }
}

}  // namespace thinwire

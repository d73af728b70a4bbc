// Quantisers. Every operation is rounded separately, in the order written here, as in the torch implementation.
#include "values.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "blocks.hpp"
#include "unary.hpp"

namespace thinwire {
namespace {

struct Scales {
  float first;   // base of the levels, or the mean of the positive values (Sign)
  float second;  // step between the levels, or the mean magnitude of the negative values (Sign)
};

unsigned bits_of(Format f) {
  switch (f) {
    case Format::bits8: return 8;
    case Format::bits4: return 4;
    case Format::bits2: return 2;
    case Format::sign: return 1;
    case Format::float32: return 32;
    default: return 16;
  }
}

bool has_scales(Format f) { return f >= Format::bits8; }

// The bytes of a block of a format with codes of a fixed width.
size_t fixed_bytes(Format f, size_t n) { return (has_scales(f) ? sizeof(Scales) : 0) + (n * bits_of(f) + 7) / 8; }

float smallest_of(const float* v, size_t n) {
  uint32_t bits = 0x7f800000u;
  for (size_t i = 0; i < n; ++i) bits = magnitude_bits(v[i]) < bits ? magnitude_bits(v[i]) : bits;
  return std::bit_cast<float>(bits);
}

// The levels of two bits: the means of the magnitudes below and above the block's mean. Their error is smaller than
// that of the block's extremes.
Scales two_means(const float* v, size_t n, const FixedPoint& fixed, float& split) {
  int64_t sum = 0;
  for (size_t i = 0; i < n; ++i) sum += fixed.of(v[i]);
  split = fixed.mean(sum, int64_t(n));
  const float limit = split;  // a copy, which no store can change: the loop has no branch and vectorises
  int64_t high = 0;
  int32_t above = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t up = -int32_t(magnitude(v[i]) > limit);
    high += fixed.of(v[i]) & up;
    above -= up;
  }
  const float base = fixed.mean(sum - high, int64_t(n) - above);
  return {base, above ? fixed.mean(high, above) - base : 0.0f};
}

Scales sign_means(const float* v, size_t n, const FixedPoint& fixed) {
  int64_t all = 0, down = 0;
  int32_t negatives = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t negative = std::bit_cast<int32_t>(v[i]) >> 31;  // all bits are set, or none
    all += fixed.of(v[i]);
    down += fixed.of(v[i]) & negative;
    negatives -= negative;
  }
  return {fixed.mean(all - down, int64_t(n) - negatives), fixed.mean(down, negatives)};
}

// Rounds to nearest, ties to even, for 0 <= x < 2^22: the addition leaves no bits for a fraction.
inline float nearest(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

// Sets codes[i] to the sign bit above the level; the receiver reads sign * (base + step * level).
Scales choose_levels(Format f, const float* v, size_t n, float largest, const Rounding& rounding, uint8_t* codes) {
  const unsigned bits = bits_of(f);
  const int top = (1 << (bits - 1)) - 1;
  if (largest < kSmallest) {
    std::memset(codes, 0, n);
    return {0.0f, 0.0f};
  }
  const auto code = [&](float x, int level) {
    return uint8_t(unsigned(std::signbit(x)) << (bits - 1) | unsigned(level));
  };
  if (f == Format::bits2 && !rounding.stochastic) {
    float split = 0.0f;
    const Scales s = two_means(v, n, FixedPoint(largest), split);
    for (size_t i = 0; i < n; ++i) codes[i] = code(v[i], magnitude(v[i]) > split);
    return s;
  }
  const float smallest = smallest_of(v, n);
  const Scales s{smallest, (largest - smallest) / float(top)};
  // Dividing by infinity gives level 0 where all magnitudes are equal.
  const float step = s.second > 0.0f ? s.second : std::numeric_limits<float>::infinity();
  float levels[kBlock];
  for (size_t i = 0; i < n; ++i) levels[i] = (magnitude(v[i]) - smallest) / step;
  if (rounding.stochastic)
    for (size_t i = 0; i < n; ++i) {
      const uint64_t random = mix(rounding.seed + rounding.counter + i);
      levels[i] = float(int(levels[i] + float(random >> 40) * 0x1p-24f));
    }
  for (size_t i = 0; i < n; ++i) codes[i] = code(v[i], std::min(int(nearest(levels[i])), top));
  return s;
}

Scales choose_signs(const float* v, size_t n, float largest, uint8_t* codes) {
  for (size_t i = 0; i < n; ++i) codes[i] = std::signbit(v[i]);
  if (largest < kSmallest) return {0.0f, 0.0f};
  return sign_means(v, n, FixedPoint(largest));
}

// Calls f.operator()<bits>() for a format that has scales.
template <class F>
void with_bits(Format format, F&& f) {
  switch (format) {
    case Format::bits8: return f.template operator()<8>();
    case Format::bits4: return f.template operator()<4>();
    case Format::bits2: return f.template operator()<2>();
    default: return f.template operator()<1>();
  }
}

// Computes the values of codes. Sender and receiver share this function.
template <unsigned Bits>
void dequantise(Scales s, const uint8_t* codes, size_t n, float* v) {
  if constexpr (Bits == 1) {
    for (size_t i = 0; i < n; ++i) v[i] = codes[i] ? -s.second : s.first;
  } else {
    constexpr uint32_t top = (1u << (Bits - 1)) - 1;
    for (size_t i = 0; i < n; ++i) {
      const float m = s.first + s.second * float(int(codes[i] & top));
      v[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(m) | uint32_t(codes[i] >> (Bits - 1)) << 31);
    }
  }
}

}  // namespace

size_t block_bytes(Format f, size_t n) { return f == Format::unary ? unary_bytes(n) : fixed_bytes(f, n); }

size_t write_block(Format f, const float* v, size_t n, Rounding rounding, uint8_t* out, float* sent) {
  if (f == Format::float32) {
    std::memcpy(out, v, n * 4);
    std::memcpy(sent, v, n * 4);
  } else if (!has_scales(f)) {
    for (size_t i = 0; i < n; ++i) {
      const uint16_t half = f == Format::float16 ? to_float16(v[i]) : to_bfloat16(v[i]);
      std::memcpy(out + 2 * i, &half, 2);
      sent[i] = f == Format::float16 ? from_float16(half) : from_bfloat16(half);
    }
  } else {
    uint8_t codes[kBlock];
    float limited[kBlock];
    float largest = largest_of(v, n);
    if (largest > kLargest) {
      for (size_t i = 0; i < n; ++i) limited[i] = std::clamp(v[i], -kLargest, kLargest);
      v = limited;
      largest = kLargest;
    }
    if (f == Format::unary) return write_unary(v, n, largest, out, sent);
    const Scales s =
        f == Format::sign ? choose_signs(v, n, largest, codes) : choose_levels(f, v, n, largest, rounding, codes);
    std::memcpy(out, &s, sizeof s);
    with_bits(f, [&]<unsigned Bits>() {
      pack<Bits>(codes, n, out + sizeof s);
      dequantise<Bits>(s, codes, n, sent);
    });
  }
  return fixed_bytes(f, n);
}

void read_block(Format f, const uint8_t* in, size_t bytes, size_t n, float* v) {
  if (f == Format::float32) {
    std::memcpy(v, in, n * 4);
  } else if (f == Format::float16) {
    for (size_t i = 0; i < n; ++i) v[i] = from_float16(read_as<uint16_t>(in, i));
  } else if (f == Format::bfloat16) {
    for (size_t i = 0; i < n; ++i) v[i] = from_bfloat16(read_as<uint16_t>(in, i));
  } else if (f == Format::unary) {
    read_unary(in, bytes, n, v);
  } else {
    const Scales s = read_as<Scales>(in, 0);
    with_bits(f, [&]<unsigned Bits>() {
      uint8_t codes[kBlock];
      unpack<Bits>(in + sizeof s, n, codes);
      dequantise<Bits>(s, codes, n, v);
    });
  }
}

const char* check_block(Format f, const uint8_t* in, size_t left, size_t n, size_t& bytes) {
  if (f == Format::unary) return check_unary(in, left, n, bytes);
  bytes = fixed_bytes(f, n);
  if (left < bytes) return "the frame ends within a block's values";
  if (f == Format::float32) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) bad |= (read_as<uint32_t>(in, i) & 0x7fffffffu) >= 0x7f800000u;
    return bad ? "a value is not finite" : nullptr;
  }
  if (!has_scales(f)) {
    const uint16_t infinity = f == Format::float16 ? 0x7c00u : 0x7f80u;
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) bad |= (read_as<uint16_t>(in, i) & 0x7fffu) >= infinity;
    return bad ? "a value is not finite" : nullptr;
  }
  const Scales s = read_as<Scales>(in, 0);
  if (!(s.first >= 0.0f && s.first <= kLargest && s.second >= 0.0f && s.second <= kLargest))
    return "a scale is negative, too large or not a number";
  const size_t used = n * bits_of(f) % 8;
  if (used && in[bytes - 1] >> used) return "the padding after a block's values is not zero";
  return nullptr;
}

}  // namespace thinwire

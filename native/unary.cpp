// Quantiser with levels in unary code. The magnitudes of selected entries are the tail of a distribution: their excess
// over the smallest is roughly exponential, so that the whole multiples of its mean are roughly geometric, and unary
// code takes little more than their entropy. The sum of a block's levels is at most n, whatever the values are: an
// outlier lengthens the block by at most one bit per value, and no escape code is needed.
#include "unary.hpp"

#include <algorithm>

#include "blocks.hpp"

namespace thinwire {
namespace {

constexpr size_t kScaleBytes = 4;
constexpr size_t kWords = 2 * kBlock / 64;  // of a full block's levels
constexpr uint16_t kLargestScale = 0x7b80;  // kLargest as a bfloat16
constexpr uint16_t kLeastScale = 0x0080;    // the smallest normal bfloat16

struct Scales {
  uint16_t base, step;  // bfloat16
};

// Subnormal scales are written as zero, because some threads flush subnormal numbers and others do not.
uint16_t to_scale(double x) {
  const uint16_t scale = to_bfloat16(float(x));
  return scale < kLeastScale ? 0 : scale;
}

// Sets levels[i] to the excess of |v[i]| over the smallest magnitude in whole multiples of the mean excess. The points
// base + step * level have the least squared error: base is the mean of level 0, step the slope of the others.
Scales choose_levels(const float* v, size_t n, float largest, int32_t* levels) {
  if (largest < kSmallest) {
    std::fill(levels, levels + n, 0);
    return {0, 0};
  }
  const FixedPoint fixed(largest);
  int32_t parts[kBlock];
  int32_t least = 1 << 24;
  int64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    parts[i] = fixed.of(v[i]);
    least = parts[i] < least ? parts[i] : least;
    sum += parts[i];
  }
  // The quotients are rounded by at most 2^-23 altogether, too little for a sum of levels above n.
  const float mean = float(double(sum - int64_t(n) * least) / double(n));
  const float unit = mean > 0.0f ? mean : 1.0f;
  int32_t all = 0, squares = 0, zeros = 0;
  int64_t low = 0, product = 0;
  for (size_t i = 0; i < n; ++i) {
    const int32_t level = int32_t(float(parts[i] - least) / unit);
    const int32_t zero = -int32_t(level == 0);  // all bits are set, or none
    levels[i] = level;
    all += level;
    squares += level * level;
    zeros -= zero;
    low += parts[i] & zero;
    product += int64_t(level) * parts[i];
  }
  const double base = double(low) / double(zeros);
  const double slope = squares ? (double(product) - double(all) * base) / double(squares) : 0.0;
  return {to_scale(base * fixed.unit), to_scale(slope * fixed.unit)};
}

// Computes the values of levels and signs. Sender and receiver share this function.
void dequantise(Scales scales, const uint8_t* negative, const int32_t* levels, size_t n, float* v) {
  const float base = from_bfloat16(scales.base), step = from_bfloat16(scales.step);
  for (size_t i = 0; i < n; ++i) {
    const float m = base + step * float(levels[i]);
    const float most = m < kLargest ? m : kLargest;
    v[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(most) | uint32_t(negative[i]) << 31);
  }
}

// The place of the n-th one from the lowest bit; n counts from 1 and the word has as many.
unsigned place_of(uint64_t word, size_t n) {
  while (--n) word &= word - 1;
  return unsigned(std::countr_zero(word));
}

}  // namespace

size_t write_unary(const float* v, size_t n, float largest, uint8_t* out, float* sent) {
  int32_t levels[kBlock];
  uint8_t negative[kBlock];
  const Scales scales = choose_levels(v, n, largest, levels);
  const bool nothing = scales.base == 0 && scales.step == 0;
  for (size_t i = 0; i < n; ++i) negative[i] = uint8_t(std::bit_cast<uint32_t>(v[i]) >> 31);
  if (nothing) std::memset(negative, 0, n);
  dequantise(scales, negative, levels, n, sent);
  std::memcpy(out, &scales, kScaleBytes);
  out += kScaleBytes;
  pack<1>(negative, n, out);
  out += (n + 7) / 8;
  uint64_t words[kWords] = {};
  size_t at = 0;
  for (size_t i = 0; i < n; ++i, ++at) {
    at += size_t(levels[i]);
    words[at / 64] |= uint64_t(1) << at % 64;
  }
  const size_t bytes = (at + 7) / 8;
  std::memcpy(out, words, bytes);
  return kScaleBytes + (n + 7) / 8 + bytes;
}

void read_unary(const uint8_t* in, size_t bytes, size_t n, float* v) {
  const Scales scales = read_as<Scales>(in, 0);
  uint8_t negative[kBlock];
  int32_t levels[kBlock];
  unpack<1>(in + kScaleBytes, n, negative);
  const size_t begin = kScaleBytes + (n + 7) / 8;
  uint64_t words[kWords] = {};
  std::memcpy(words, in + begin, bytes - begin);
  int32_t next = 0;  // the place of the next one if its level is 0
  int32_t* out = levels;
  for (size_t w = 0; 64 * w < 8 * (bytes - begin); ++w)
    for (uint64_t word = words[w]; word; word &= word - 1) {
      const int32_t at = int32_t(64 * w) + std::countr_zero(word);
      *out++ = at - next;
      next = at + 1;
    }
  dequantise(scales, negative, levels, n, v);
}

const char* check_unary(const uint8_t* in, size_t left, size_t n, size_t& bytes) {
  constexpr const char* kTruncated = "the frame ends within a block's values";
  constexpr const char* kPadding = "the padding after a block's values is not zero";
  const size_t begin = kScaleBytes + (n + 7) / 8;
  if (left < begin) return kTruncated;
  const Scales scales = read_as<Scales>(in, 0);
  if (scales.base > kLargestScale || scales.step > kLargestScale)
    return "a scale is negative, too large or not a number";
  if (n % 8 && in[begin - 1] >> n % 8) return kPadding;
  const size_t most = (2 * n + 7) / 8, there = std::min(left - begin, most);
  uint64_t words[kWords] = {};
  std::memcpy(words, in + begin, there);
  size_t ones = 0, end = 2 * n;  // the first bit after the last level
  for (size_t w = 0; w < kWords; ++w) {
    const size_t more = size_t(std::popcount(words[w]));
    if (ones + more >= n) {
      end = 64 * w + place_of(words[w], n - ones) + 1;
      ones = n;
      break;
    }
    ones += more;
  }
  if (ones < n && there < most) return kTruncated;
  if (ones < n || end > 2 * n) return "the levels of a block's values are too large";
  if (end % 8 && in[begin + end / 8] >> end % 8) return kPadding;
  bytes = begin + (end + 7) / 8;
  return nullptr;
}

}  // namespace thinwire

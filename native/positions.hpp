// Positions of a block's entries as Golomb-coded gaps; parameter 0 is a bitmap, kRun means "no gaps, no bits".
#pragma once
#include "common.hpp"

namespace thinwire {

constexpr uint8_t kRun = 255;
constexpr uint8_t kLastParameter = 246;

// Divisor of a parameter: 1, 2, 3, then (4, 5, 6, 7) * 2^shift.
struct Divisor {
  unsigned factor;  // 1 to 7
  unsigned shift;   // 0 to 60
};
inline Divisor divisor_of(uint8_t parameter) {
  if (parameter < 3) return {parameter + 1u, 0};
  return {4u + ((parameter - 3u) & 3u), (parameter - 3u) >> 2};
}

// Largest number of bytes that a block's coding byte and gaps can take (see positions.cpp).
constexpr size_t kMostPositionBytes = 1 + (kBlock * 66 + 2 * kBlock + 64) / 8 + 16;

// Writes the coding byte and the gaps of n ascending positions above `previous` (UINT64_MAX before the first);
// returns the bytes written. out has kMostPositionBytes.
size_t write_positions(const uint64_t* positions, size_t n, uint64_t previous, uint8_t* out);

// The gaps of a block's n positions above `previous` and below numel, from `in` (the byte after the coding byte), and
// where the positions go, as uint32_t or uint64_t.
template <class Position>
struct Gaps {
  uint8_t parameter;
  const uint8_t *in, *end;
  size_t n;
  uint64_t previous, numel;
  Position* out;
  size_t read = 0;  // bytes, unless there is an error
  const char* error = nullptr;
};
template <class Position>
void read_positions(Gaps<Position>&);
// Two blocks, sooner than one after the other.
void read_positions(Gaps<uint32_t>&, Gaps<uint32_t>&);

// RandomK: position j of k lies at a random place in the j-th of k equal strata of n elements.
inline uint64_t stratum_position(uint64_t seed, uint64_t j, uint64_t k, uint64_t n) {
  const auto wide = [&](uint64_t i) { return uint64_t((unsigned __int128)i * n / k); };
  const uint64_t low = wide(j), width = wide(j + 1) - low;
  return low + uint64_t((unsigned __int128)(mix(seed + j) >> 33) * width >> 31);
}

}  // namespace thinwire

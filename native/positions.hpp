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

// Reads the gaps of n positions below numel from in (the byte after the coding byte) into out, which
// receives uint32_t or uint64_t. Returns the bytes read, or 0 with *error set.
template <class Position>
size_t read_positions(uint8_t parameter, const uint8_t* in, const uint8_t* end, size_t n, uint64_t previous,
                      uint64_t numel, Position* out, const char** error);

// RandomK: position j of k lies at a random place in the j-th of k equal strata of n elements.
inline uint64_t stratum_position(uint64_t seed, uint64_t j, uint64_t k, uint64_t n) {
  const auto wide = [&](uint64_t i) { return uint64_t((unsigned __int128)i * n / k); };
  const uint64_t low = wide(j), width = wide(j + 1) - low;
  return low + uint64_t((unsigned __int128)(mix(seed + j) >> 33) * width >> 31);
}

}  // namespace thinwire

// The positions of a block's entries as Golomb-coded gaps. Parameter 0 is a bitmap; kRun means that all gaps are 0.
#pragma once
#include "common.hpp"

namespace thinwire {

constexpr uint8_t kRun = 255;
constexpr uint8_t kLastParameter = 246;

// The divisor of a parameter: 1, 2, 3, then (4, 5, 6, 7) * 2^shift.
struct Divisor {
  unsigned factor;  // 1 to 7
  unsigned shift;   // 0 to 60
};
inline Divisor divisor_of(uint8_t parameter) {
  if (parameter < 3) return {parameter + 1u, 0};
  return {4u + ((parameter - 3u) & 3u), (parameter - 3u) >> 2};
}

// The most bytes that a block's coding byte and gaps can take (see positions.cpp).
constexpr size_t kMaxPositionBytes = 1 + (kBlock * 66 + 2 * kBlock + 64) / 8 + 16;

// Writes the coding byte and the gaps of n ascending positions above `previous` (UINT64_MAX before the first);
// returns the number of bytes written. out has room for kMaxPositionBytes.
size_t write_positions(const uint64_t* positions, size_t n, uint64_t previous, uint8_t* out);

// The gaps of a block's n positions above `previous` and below numel, in the bytes from `in` (after the coding byte),
// and where to write the positions, as uint32_t or uint64_t.
template <class Position>
struct Gaps {
  uint8_t parameter;
  const uint8_t *in, *end;
  size_t n;
  uint64_t previous, numel;
  Position* out;
  size_t read = 0;  // number of bytes read, unless there is an error
  const char* error = nullptr;
};
template <class Position>
void read_positions(Gaps<Position>&);
// Decodes two blocks in turns, which hides the latency of their dependent steps.
void read_positions(Gaps<uint32_t>&, Gaps<uint32_t>&);

// RandomK: the random position in the j-th of k equal strata of n elements.
inline uint64_t stratum_position(uint64_t seed, uint64_t j, uint64_t k, uint64_t n) {
  const auto wide = [&](uint64_t i) { return uint64_t((unsigned __int128)i * n / k); };
  const uint64_t low = wide(j), width = wide(j + 1) - low;
  return low + uint64_t((unsigned __int128)(mix(seed + j) >> 33) * width >> 31);
}

}  // namespace thinwire

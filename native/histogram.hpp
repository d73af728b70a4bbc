// Magnitudes of a sample by bins of equal ratio: what a selection needs to weigh every threshold at once.
#pragma once
#include "statistics.hpp"

namespace thinwire {

// Each bin is about 1 % wide; 24 octaves of them, below which nothing adds to a sum of squares.
constexpr size_t kBins = 24 << 6;
constexpr unsigned kBinShift = 17;

struct Bin {
  uint32_t count;
  float low, high;  // the smallest and the largest magnitude in it
};

// The bins that hold something, from the largest magnitude down, of about `wanted` elements; zeros have none.
// *taken receives the size of the sample, zeros included.
std::vector<Bin> histogram(const std::vector<Vector>&, uint64_t wanted, uint64_t seed, uint64_t* taken);

}  // namespace thinwire

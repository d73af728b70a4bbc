// Histograms of sampled magnitudes with bins of equal ratio: a selection compares all thresholds with them at once.
#pragma once
#include "statistics.hpp"

namespace thinwire {

// Bins are about 1 % wide and cover 24 octaves. Smaller magnitudes contribute nothing to a sum of squares. A bin is the
// exponent and six bits of the fraction.
constexpr size_t kBins = 24 << 6;
constexpr unsigned kBinShift = 17;

struct Bin {
  uint32_t count;
  float low, high;  // the smallest and the largest magnitude in it
};

// Returns the bins that are not empty, largest magnitudes first, of about `wanted` elements. Zeros are left out; *taken
// receives the size of the sample with them.
std::vector<Bin> histogram(const std::vector<Vector>&, uint64_t wanted, uint64_t seed, uint64_t* taken);

}  // namespace thinwire

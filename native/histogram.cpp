// Histograms in one pass over a sample: the upper bits of a magnitude are its bin.
#include "histogram.hpp"

#include <algorithm>

namespace thinwire {

std::vector<Bin> histogram(const std::vector<Vector>& vectors, uint64_t wanted, uint64_t seed, uint64_t* taken) {
  struct Open {
    uint32_t count = 0, low = 0xffffffffu, high = 0;
  };
  const std::vector<uint32_t> sample = sample_of(vectors, wanted, seed);
  *taken = sample.size();
  uint32_t largest = 0;
  for (const uint32_t bits : sample) largest = std::max(largest, bits);
  // Magnitudes too small to contribute share the first bin, which is left out.
  const uint32_t top = largest >> kBinShift, bottom = top > kBins ? top - uint32_t(kBins) : 0;
  std::vector<Open> open(kBins + 1);
  for (const uint32_t bits : sample) {
    Open& bin = open[std::max(bits >> kBinShift, bottom) - bottom];
    ++bin.count;
    bin.low = std::min(bin.low, bits);
    bin.high = std::max(bin.high, bits);
  }
  std::vector<Bin> found;
  for (size_t i = kBins + 1; i-- > 1;)
    if (open[i].count)
      found.push_back({open[i].count, std::bit_cast<float>(open[i].low), std::bit_cast<float>(open[i].high)});
  return found;
}

}  // namespace thinwire

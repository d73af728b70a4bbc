// Statistics of vectors for selections: sampled thresholds and moments, exact order statistics, finiteness.
#pragma once
#include <vector>

#include "scan.hpp"

namespace thinwire {

// Returns the bits of the magnitudes of about `wanted` elements, in proportion to the vectors' sizes.
std::vector<uint32_t> sample_of(const std::vector<Vector>&, uint64_t wanted, uint64_t seed);

struct SampledThreshold {
  float value;   // a magnitude of the sample, or 0 if the density selects everything
  double above;  // the share of the sample that exceeds it; less than the density where many are equal
};
// Returns for each density the threshold that about this share of all magnitudes exceeds, from about `wanted` of them.
std::vector<SampledThreshold> sampled_thresholds(const std::vector<Vector>&, const std::vector<double>& densities,
                                                 uint64_t wanted, uint64_t seed);

struct Moments {
  uint64_t count = 0;
  double sum = 0, squares = 0, magnitudes = 0;
};
Moments moments(const Vector&, uint64_t wanted, uint64_t seed);

struct OrderStatistic {
  float value;       // the magnitude of the rank (0 is the largest)
  uint64_t greater;  // how many magnitudes are greater
  uint64_t equal;    // how many are equal to it
};
// Exact, over all vectors together, with radix histograms and without copying the vectors.
OrderStatistic select(const std::vector<Vector>&, uint64_t rank);

// Copies the magnitudes above a threshold, at most `capacity` of them; returns how many there are. If there is a
// residual, the scan accumulates it.
uint64_t collect_above(const Vector&, float threshold, float* out, uint64_t capacity);

bool all_zero(const void* data, Dtype, size_t n);
bool all_finite(const void* data, Dtype, size_t n);
bool all_finite_avx2(const void* data, Dtype, size_t n);

constexpr size_t kLine = 32;  // adjacent elements of a sample: two cache lines, which the processor fetches in pairs
// Writes the bits of those magnitudes of a line that are at least `floor`; `out` needs room for kLine + kSlack.
size_t line_above_avx2(const Source&, size_t begin, uint32_t floor, uint32_t* out);

}  // namespace thinwire

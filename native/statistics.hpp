// What selections ask of a vector: sampled histograms and moments, exact order statistics, finiteness.
#pragma once
#include <vector>

#include "scan.hpp"

namespace thinwire {

struct Vector {
  Source source;  // read as memory * decay + gradient where there is a memory; never written here
  size_t n;
};

// The bits of the magnitudes of about `wanted` elements, an even share of each vector.
std::vector<uint32_t> sample_of(const std::vector<Vector>&, uint64_t wanted, uint64_t seed);

struct SampledThreshold {
  float value;   // a magnitude that occurs in the vectors, or 0 where the density asks for everything
  double above;  // the share of the sample that exceeds it: less than the density where many are equal
};
// For each density the threshold that about this share of all magnitudes exceeds, from about `wanted` of them.
std::vector<SampledThreshold> sampled_thresholds(const std::vector<Vector>&, const std::vector<double>& densities,
                                                 uint64_t wanted, uint64_t seed);

struct Moments {
  uint64_t count = 0;
  double sum = 0, squares = 0, magnitudes = 0;
};
Moments moments(const Vector&, uint64_t wanted, uint64_t seed);

struct OrderStatistic {
  float value;       // of rank `rank` (0 = largest magnitude)
  uint64_t greater;  // how many magnitudes are greater
  uint64_t equal;    // how many are equal to it
};
// Exact, by radix histograms over all vectors together, without a copy of them.
OrderStatistic select(const std::vector<Vector>&, uint64_t rank);

// Copies the magnitudes above a threshold, at most `capacity` of them; returns how many there are. A scan: the memory,
// where there is one, holds the accumulated vector afterwards.
uint64_t collect_above(const Vector&, float threshold, float* out, uint64_t capacity);

bool all_zero(const void* data, Dtype, size_t n);
bool all_finite(const void* data, Dtype, size_t n);
bool all_finite_avx2(const void* data, Dtype, size_t n);

constexpr size_t kLine = 32;  // elements that a sample takes side by side: two cache lines, which are fetched in pairs
// The bits of those magnitudes of a line that are `floor` or more; `out` needs kLine + kSlack places.
size_t line_above_avx2(const Source&, size_t begin, uint32_t floor, uint32_t* out);

}  // namespace thinwire

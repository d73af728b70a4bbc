// Cutoffs: the rule of top-k selection, and exact order statistics.
#pragma once
#include "statistics.hpp"
#include "writer.hpp"

namespace thinwire {

// A sample that determines a threshold should hold this many entries above it: the relative error of the number of
// selected entries is then about 1 / sqrt(kSampledAbove).
constexpr uint64_t kSampledAbove = 1500;

// How many of n elements a density stands for: at least one, if there are any.
uint64_t entry_count(double density, uint64_t n);
// How many of n elements to sample for the threshold of a density; 0 where an exact threshold is as cheap.
uint64_t sample_size(double density, uint64_t n);
// How many entries equal to the threshold may be sent to make up a missing share of n elements. Zeros are never sent.
uint64_t allowed_ties(double threshold, double missing, uint64_t n);

// The cutoff of a sampled top-k, as TopK in selection.py composes it from the functions above.
Cutoff top_cutoff(Vector&, double density, uint64_t step);

// The exact magnitude of a rank (0 is the largest) over all vectors together. Every element of a large vector is read
// more than once; the residual then holds the sum afterwards, and the vectors are changed accordingly.
OrderStatistic order_statistic(std::vector<Vector>&, uint64_t rank);

}  // namespace thinwire

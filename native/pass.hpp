// One chunk of the pass over a vector, for all writers: accumulates it and selects its entries.
#pragma once
#include <limits>

#include "scan.hpp"
#include "writer.hpp"

namespace thinwire {

// Removes entries equal to the threshold beyond the first `ties`; returns how many entries are left.
inline size_t drop_ties(uint32_t* offsets, float* values, size_t n, Cutoff& cutoff) {
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (magnitude(values[i]) == cutoff.threshold) {
      if (cutoff.ties == 0) continue;
      --cutoff.ties;
    }
    offsets[kept] = offsets[i];
    values[kept++] = values[i];
  }
  return kept;
}

// Four independent sums avoid a chain of dependent additions.
inline double sum_of_magnitudes(const float* values, size_t n) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (size_t lane = 0; lane < 4; ++lane) sums[lane] += magnitude(values[i + lane]);
  for (; i < n; ++i) sums[0] += magnitude(values[i]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Writes the selected entries to offsets and values and counts them in `written`; returns how many there are.
inline size_t pass(const Source& source, size_t begin, size_t length, Cutoff& cutoff, bool room, uint32_t* offsets,
                   float* values, Written& written) {
  // Once a frame is full, the pass only accumulates: all further entries stay in the residual.
  constexpr float kNever = std::numeric_limits<float>::infinity();
  const bool ties = room && cutoff.ties > 0;
  size_t kept = scan_in_use()(source, begin, length, room ? cutoff.threshold : kNever, ties, offsets, values);
  if (ties) kept = drop_ties(offsets, values, kept, cutoff);
  written.magnitudes += sum_of_magnitudes(values, kept);
  written.selected += kept;
  return kept;
}

}  // namespace thinwire

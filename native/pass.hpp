// One chunk of the pass over a vector: what survives the cut, for every kind of writer.
#pragma once
#include <limits>

#include "scan.hpp"
#include "writer.hpp"

namespace thinwire {

// Of the entries equal to the threshold only the first `ties` stay; returns how many entries are left.
inline size_t drop_ties(uint32_t* offsets, float* values, size_t n, Cut& cut) {
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (magnitude(values[i]) == cut.threshold) {
      if (cut.ties == 0) continue;
      --cut.ties;
    }
    offsets[kept] = offsets[i];
    values[kept++] = values[i];
  }
  return kept;
}

// Four sums that do not wait for one another.
inline double sum_of_magnitudes(const float* values, size_t n) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (size_t lane = 0; lane < 4; ++lane) sums[lane] += magnitude(values[i + lane]);
  for (; i < n; ++i) sums[0] += magnitude(values[i]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Survivors in offsets and values, of which `written` takes note; returns how many.
inline size_t pass(const Source& source, size_t begin, size_t length, Cut& cut, bool room, uint32_t* offsets,
                   float* values, Written& written) {
  // Once a frame is full the pass only accumulates: what comes from here on stays in the memory.
  constexpr float kNever = std::numeric_limits<float>::infinity();
  const bool ties = room && cut.ties > 0;
  size_t kept = scan_in_use()(source, begin, length, room ? cut.threshold : kNever, ties, offsets, values);
  if (ties) kept = drop_ties(offsets, values, kept, cut);
  written.magnitudes += sum_of_magnitudes(values, kept);
  written.selected += kept;
  return kept;
}

}  // namespace thinwire

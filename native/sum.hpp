// Sums of frames: what a receiver makes of everybody's frames, one stretch of the result after the other.
#pragma once
#include "deal.hpp"
#include "reader.hpp"

namespace thinwire {

struct Sum {
  float* out;
  uint64_t n;
  Deal deal;  // the i-th frame holds the i-th owner's share; a world of one: every frame holds the whole
};

// sums[id].out = the weighted values of all frames, added in the order of the frames; zero where none has an entry.
void sum_frames(const std::vector<const Reader*>& frames, const std::vector<Sum>& sums, float weight);

// whole += share, element by element of an owner's blocks.
void add_share(float* whole, uint64_t n, const Deal&, uint64_t owner, const float* share);

}  // namespace thinwire

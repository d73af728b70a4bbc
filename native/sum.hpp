// Sums of frames that were received together.
#pragma once
#include "partition.hpp"
#include "reader.hpp"

namespace thinwire {

struct Sum {
  float* out;
  uint64_t n;
  Partition partition;  // frame i holds the share of owner i; with a world of one every frame holds the whole
};

// Sets sums[id].out to the weighted values of all frames, added in the order of the frames; zero without an entry.
void sum_frames(const std::vector<const Reader*>& frames, const std::vector<Sum>& sums, float weight);

// Adds an owner's share to the whole vector.
void add_share(float* whole, uint64_t n, const Partition&, uint64_t owner, const float* share);

}  // namespace thinwire

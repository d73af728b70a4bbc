// Who owns what: blocks of a vector are dealt to ranks in turn, one place further each round, so that columns and
// rows of a matrix spread evenly. An owner's blocks, put together, are its share; a world of one owns everything.
#pragma once
#include "common.hpp"

namespace thinwire {

constexpr size_t kDeal = 512;

struct Deal {
  uint64_t world = 1, first = 0;

  uint64_t owner(uint64_t block) const { return (block + block / world + first) % world; }
  // Where the owner's block of a round begins in the whole vector: its share has one block of each round.
  uint64_t begin(uint64_t owner, uint64_t round) const {
    const uint64_t turned = (round + first) % world;
    return (round * world + (owner >= turned ? owner - turned : owner + world - turned)) * kDeal;
  }
  // Elements of an n-element vector that an owner has.
  uint64_t share(uint64_t n, uint64_t owner_) const {
    const uint64_t blocks = (n + kDeal - 1) / kDeal, rounds = blocks / world;
    uint64_t size = rounds * kDeal;
    if (begin(owner_, rounds) < n) size += kDeal;
    if (blocks && owner(blocks - 1) == owner_) size -= blocks * kDeal - n;
    return size;
  }
};

// The whole vector's position of an owner's positions, which mostly lie in the same block as the one before.
class Placed {
 public:
  Placed(const Deal& deal, uint64_t owner) : deal_(deal), owner_(owner) {}
  uint64_t operator()(uint64_t position) {
    const uint64_t round = position / kDeal;
    if (round != round_) shift_ = deal_.begin(owner_, round_ = round) - round * kDeal;
    return position + shift_;
  }

 private:
  Deal deal_;
  uint64_t owner_, round_ = ~uint64_t(0), shift_ = 0;
};

}  // namespace thinwire

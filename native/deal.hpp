// Who owns what: blocks of a vector are dealt to ranks in turn, from another rank each round, so that columns and rows
// of a matrix spread evenly. An owner's blocks, put together, are its share; a world of one owns everything.
#pragma once
#include "common.hpp"

namespace thinwire {

// Small, so that entries that crowd in a row or a column of a matrix spread over all owners.
constexpr size_t kDeal = 64;

struct Deal {
  uint64_t world = 1, first = 0;

  // Who gets the first block of a round: steps of the golden ratio, which no width of a matrix falls in with.
  uint64_t turn(uint64_t round) const { return ((round + first) * 2654435761u & 0xffffffffu) * world >> 32; }
  uint64_t owner(uint64_t block) const { return (block % world + turn(block / world)) % world; }
  // Where the owner's block of a round begins in the whole vector: its share has one block of each round.
  uint64_t begin(uint64_t owner, uint64_t round) const {
    const uint64_t turned = turn(round);
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

// Who owns positions that ascend, and what they are in the owner's share.
class Dealer {
 public:
  explicit Dealer(const Deal& deal) : deal_(deal), turn_(deal.turn(0)) {}
  // Returns the owner.
  uint64_t operator()(uint64_t position, uint64_t& in_share) {
    while (position - begin_ >= deal_.world * kDeal) {
      begin_ += deal_.world * kDeal;
      share_ += kDeal;
      turn_ = deal_.turn(share_ / kDeal);
    }
    const uint64_t owner = (position - begin_) / kDeal + turn_;
    in_share = share_ + position % kDeal;
    return owner < deal_.world ? owner : owner - deal_.world;
  }

 private:
  Deal deal_;
  uint64_t turn_, begin_ = 0, share_ = 0;  // of the round that the last position was in
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

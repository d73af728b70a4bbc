// Partitions: which rank owns which elements of a vector. Blocks are dealt to the ranks round-robin, and every round
// begins with another rank, so that the columns and rows of a matrix spread evenly. An owner's blocks, put together,
// are its share. With a world of one, the owner has the whole vector.
#pragma once
#include "common.hpp"

namespace thinwire {

// Elements of a block. Small, so that entries that concentrate in a row or a column of a matrix spread over all owners.
constexpr size_t kPartitionBlock = 64;

struct Partition {
  uint64_t world = 1, first = 0;

  // The rank that owns the first block of a round. Steps of the golden ratio coincide with no width of a matrix.
  uint64_t shift(uint64_t round) const { return ((round + first) * 2654435761u & 0xffffffffu) * world >> 32; }
  uint64_t owner(uint64_t block) const { return (block % world + shift(block / world)) % world; }
  // Where the owner's block of a round begins in the whole vector. Every share has one block of each round.
  uint64_t begin(uint64_t owner, uint64_t round) const {
    const uint64_t shifted = shift(round);
    return (round * world + (owner >= shifted ? owner - shifted : owner + world - shifted)) * kPartitionBlock;
  }
  // The number of elements that an owner has of n.
  uint64_t share(uint64_t n, uint64_t owner_) const {
    const uint64_t blocks = (n + kPartitionBlock - 1) / kPartitionBlock, rounds = blocks / world;
    uint64_t size = rounds * kPartitionBlock;
    if (begin(owner_, rounds) < n) size += kPartitionBlock;
    if (blocks && owner(blocks - 1) == owner_) size -= blocks * kPartitionBlock - n;
    return size;
  }
};

// Finds the owners of ascending positions, and the positions in the owners' shares.
class OwnerLookup {
 public:
  explicit OwnerLookup(const Partition& partition) : partition_(partition), shift_(partition.shift(0)) {}
  // Returns the owner.
  uint64_t operator()(uint64_t position, uint64_t& in_share) {
    while (position - begin_ >= partition_.world * kPartitionBlock) {
      begin_ += partition_.world * kPartitionBlock;
      share_ += kPartitionBlock;
      shift_ = partition_.shift(share_ / kPartitionBlock);
    }
    const uint64_t owner = (position - begin_) / kPartitionBlock + shift_;
    in_share = share_ + position % kPartitionBlock;
    return owner < partition_.world ? owner : owner - partition_.world;
  }

 private:
  Partition partition_;
  uint64_t shift_, begin_ = 0, share_ = 0;  // of the round of the latest position
};

// Converts positions in an owner's share to positions in the whole vector. Consecutive ones mostly share a block.
class ShareToWhole {
 public:
  ShareToWhole(const Partition& partition, uint64_t owner) : partition_(partition), owner_(owner) {}
  uint64_t operator()(uint64_t position) {
    const uint64_t round = position / kPartitionBlock;
    if (round != round_) offset_ = partition_.begin(owner_, round_ = round) - round * kPartitionBlock;
    return position + offset_;
  }

 private:
  Partition partition_;
  uint64_t owner_, round_ = ~uint64_t(0), offset_ = 0;
};

}  // namespace thinwire

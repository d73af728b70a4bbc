// Shards: a batch of vectors as frames of at most so many bytes, any of which may be lost; and what came of them.
#pragma once
#include <memory>
#include <vector>

#include "reader.hpp"
#include "writer.hpp"

namespace thinwire {

// In front of each frame: the first tensor's place in the batch, and the element from which its positions count.
constexpr size_t kShardBytes = 8;
// Added to that place where values are exact and take the place of what is there.
constexpr uint32_t kExact = uint32_t(1) << 31;

class ShardWriter {
 public:
  ShardWriter(size_t budget, bool exact);

  Written add_selected(uint32_t tensor, const Source&, size_t n, const Target&, Cut, Format, Rounding);
  // Entries chosen elsewhere: ascending positions below n. What the receiver will read goes to `sent`.
  void add_entries(uint32_t tensor, const uint64_t* positions, const float* values, uint64_t count, size_t n,
                   float* sent, Format, Rounding);
  // All shards; nothing may be added any more.
  const std::vector<std::vector<uint8_t>>& finish();

 private:
  void begin(uint32_t tensor, size_t n, Format, Rounding);
  template <class Settle>
  void take(uint64_t position, float value, Settle&&);
  template <class Settle>
  void flush(Settle&&);
  void open_shard();
  bool open_section();
  void close_section();
  void close_shard();

  size_t budget_;
  uint32_t flags_;
  std::vector<std::vector<uint8_t>> shards_;
  std::unique_ptr<Writer> writer_;  // of the last shard, while there is room in it
  uint32_t first_ = 0;              // its first tensor
  uint64_t base_ = 0;               // where that tensor's positions begin
  // The tensor being written, and its section in the present shard.
  uint32_t tensor_ = 0;
  size_t n_ = 0;
  Format format_{};
  Rounding rounding_{};
  bool open_ = false;
  size_t mark_ = 0;
  uint64_t count_ = 0;
  size_t pending_ = 0;
  uint64_t positions_[kBlock];
  float values_[kBlock];
};

// Shards of one batch, as many as came, validated together: FrameFault, and nothing is believed, if one is wrong.
class ShardReader {
 public:
  struct Piece {
    uint32_t tensor;
    const Section* section;
    size_t shard;
  };

  // bytes: the shards, one after the other, of these sizes. exact: whether shards of exact values are expected.
  ShardReader(std::vector<uint8_t> bytes, const std::vector<size_t>& sizes, const std::vector<uint64_t>& numels,
              bool exact);
  ShardReader(const ShardReader&) = delete;  // its parts point at one another

  const std::vector<Piece>& pieces() const { return pieces_; }
  // outs[tensor][position] += weight * value, or = value where values are exact.
  void add(const std::vector<float*>& outs, float weight) const;
  void entries(const Piece&, uint64_t* positions, float* values) const;

 private:
  struct Shard {
    uint32_t tensor;
    uint64_t begin;
    bool exact;
    std::unique_ptr<Reader> reader;
  };
  std::vector<uint8_t> bytes_;  // the readers point into them
  std::vector<Shard> shards_;
  std::vector<Piece> pieces_;
};

}  // namespace thinwire

// Shards: a batch of vectors in frames of limited size, any of which may be lost.
#pragma once
#include <memory>
#include <vector>

#include "reader.hpp"
#include "writer.hpp"

namespace thinwire {

// The bytes before each frame: the index of its first tensor in the batch, and the element from which its positions
// count.
constexpr size_t kShardBytes = 8;
// Added to that index if the values are exact and overwrite what is there.
constexpr uint32_t kExact = uint32_t(1) << 31;

class ShardWriter {
 public:
  ShardWriter(size_t budget, bool exact);

  // A section's id is the tensor's index in the batch.
  Written add_selected(const SectionInput&, Cutoff);
  void add_entries(const EntriesInput&);
  // Returns all shards. Nothing may be added afterwards.
  const std::vector<std::vector<uint8_t>>& finish();

 private:
  void begin(uint32_t tensor, size_t n, Format, Rounding);
  // on_written(positions, values, sent, count) is called for the entries of each block that was written.
  template <class OnWritten>
  void take(uint64_t position, float value, OnWritten&&);
  template <class OnWritten>
  void flush(OnWritten&&);
  void open_shard();
  bool open_section();
  void close_section();
  void close_shard();

  size_t budget_;
  uint32_t flags_;
  std::vector<std::vector<uint8_t>> shards_;
  std::unique_ptr<Writer> writer_;  // of the current shard
  uint32_t first_ = 0;              // its first tensor
  uint64_t base_ = 0;               // where that tensor's positions begin
  // The current tensor, and its section in the current shard.
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

// Reads those shards of a batch that arrived. All are validated together; FrameFault if one is wrong.
class ShardReader {
 public:
  struct Piece {
    uint32_t tensor;
    const Section* section;
    size_t shard;
  };

  // bytes: the shards of these sizes, one after the other. exact: whether shards of exact values are allowed.
  ShardReader(std::vector<uint8_t> bytes, const std::vector<size_t>& sizes, const std::vector<uint64_t>& numels,
              bool exact);
  ShardReader(const ShardReader&) = delete;  // its members point into one another

  const std::vector<Piece>& pieces() const { return pieces_; }
  // Adds weight * value to outs[tensor][position]; exact values overwrite it.
  void add(const std::vector<float*>& outs, float weight) const;
  void entries(const Piece&, uint64_t* positions, float* values) const;

 private:
  struct Shard {
    uint32_t tensor;
    uint64_t begin;
    bool exact;
    std::unique_ptr<Reader> reader;
  };
  std::vector<uint8_t> bytes_;  // the readers point into these bytes
  std::vector<Shard> shards_;
  std::vector<Piece> pieces_;
};

}  // namespace thinwire

// Shards, written in one pass over the vectors: a datagram's worth costs no call of its own.
#include "shards.hpp"

#include <algorithm>
#include <stdexcept>

#include "pass.hpp"

namespace thinwire {

ShardWriter::ShardWriter(size_t budget, bool exact) : budget_(budget), flags_(exact ? kExact : 0) {
  if (budget < kShardBytes + kHeaderBytes) throw std::invalid_argument("a shard needs at least 32 bytes");
}

void ShardWriter::begin(uint32_t tensor, size_t n, Format format, Rounding rounding) {
  if (n >> 32) throw std::invalid_argument("shards are of tensors of less than 2^32 elements");
  tensor_ = tensor;
  n_ = n;
  format_ = format;
  rounding_ = rounding;
}

void ShardWriter::open_shard() {
  shards_.emplace_back(budget_);
  writer_ = std::make_unique<Writer>(shards_.back().data() + kShardBytes, budget_ - kShardBytes);
  first_ = tensor_;
  base_ = positions_[0];
  const uint32_t place[2] = {first_ | flags_, uint32_t(base_)};
  std::memcpy(shards_.back().data(), place, kShardBytes);
}

// False: there is no room for another section.
bool ShardWriter::open_section() {
  mark_ = writer_->used_;
  count_ = 0;
  const uint64_t base = tensor_ == first_ ? base_ : 0;
  if (!writer_->open(tensor_ - first_, format_, Indexing::gaps, n_ - base, 0, 0)) return false;
  writer_->rounding_ = rounding_;
  return open_ = true;
}

void ShardWriter::close_section() {
  if (!open_) return;
  open_ = false;
  rounding_ = writer_->rounding_;
  writer_->close(count_);
  if (count_) return;
  writer_->used_ = mark_;  // nothing is in it: as if it had not been opened
  --writer_->sections_;
}

void ShardWriter::close_shard() {
  close_section();
  if (!writer_) return;
  shards_.back().resize(kShardBytes + writer_->finish(0));
  writer_.reset();
}

// All pending entries, as one block; those that find no room in this shard stay pending for the next.
template <class Settle>
void ShardWriter::flush(Settle&& settle) {
  if (!writer_) open_shard();
  size_t fit = 0;
  if (open_ || open_section()) {
    uint64_t relative[kBlock];
    float sent[kBlock];
    const uint64_t base = tensor_ == first_ ? base_ : 0;
    for (size_t i = 0; i < pending_; ++i) relative[i] = positions_[i] - base;
    fit = writer_->block(relative, values_, pending_, true, sent);
    settle(positions_, values_, sent, fit);
    count_ += fit;
  }
  if (fit == pending_) {
    pending_ = 0;
    return;
  }
  if (writer_->sections_ == uint32_t(open_) && !count_)
    throw std::invalid_argument("shards of " + std::to_string(budget_) + " bytes cannot hold a single entry");
  pending_ -= fit;
  std::copy(positions_ + fit, positions_ + fit + pending_, positions_);
  std::copy(values_ + fit, values_ + fit + pending_, values_);
  close_shard();
}

template <class Settle>
void ShardWriter::take(uint64_t position, float value, Settle&& settle) {
  positions_[pending_] = position;
  values_[pending_] = value;
  ++pending_;
  while (pending_ == kBlock) flush(settle);
}

Written ShardWriter::add_selected(uint32_t tensor, const Source& source, size_t n, const Target& target, Cut cut,
                                  Format format, Rounding rounding) {
  Written w;
  begin(tensor, n, format, rounding);
  const auto settle = [&](const uint64_t* positions, const float* values, const float* sent, size_t count) {
    for (size_t i = 0; i < count && target.held; ++i) target.held[positions[i]] = values[i] - sent[i];
    for (size_t i = 0; i < count && target.mask; ++i) target.mask[positions[i]] = 0.0f;
  };
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  for (size_t at = 0; at < n; at += kChunk) {
    const size_t kept = pass(source, at, std::min(kChunk, n - at), cut, true, offsets, values, w);
    for (size_t i = 0; i < kept; ++i) take(at + offsets[i], values[i], settle);
  }
  while (pending_) flush(settle);
  close_section();
  w.sent = w.selected;
  w.ties = cut.ties;
  return w;
}

void ShardWriter::add_entries(uint32_t tensor, const uint64_t* positions, const float* values, uint64_t count,
                              size_t n, float* sent, Format format, Rounding rounding) {
  begin(tensor, n, format, rounding);
  const auto settle = [&](const uint64_t*, const float*, const float* read, size_t done) {
    std::copy(read, read + done, sent);
    sent += done;
  };
  for (uint64_t i = 0; i < count; ++i) take(positions[i], values[i], settle);
  while (pending_) flush(settle);
  close_section();
}

const std::vector<std::vector<uint8_t>>& ShardWriter::finish() {
  close_shard();
  return shards_;
}

}  // namespace thinwire

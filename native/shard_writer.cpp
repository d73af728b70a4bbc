// The writer of shards: one pass over the vectors writes all of them.
#include <algorithm>
#include <stdexcept>

#include "pass.hpp"
#include "shards.hpp"

namespace thinwire {

ShardWriter::ShardWriter(size_t budget, bool exact) : budget_(budget), flags_(exact ? kExact : 0) {
  if (budget < kShardBytes + kHeaderBytes) throw std::invalid_argument("a shard needs at least 32 bytes");
}

void ShardWriter::begin(uint32_t tensor, size_t n, Format format, Rounding rounding) {
  if (n >> 32) throw std::invalid_argument("tensors in shards must have less than 2^32 elements");
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

// Returns false if there is no room for another section.
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
  writer_->used_ = mark_;  // remove the empty section
  --writer_->sections_;
}

void ShardWriter::close_shard() {
  close_section();
  if (!writer_) return;
  shards_.back().resize(kShardBytes + writer_->finish(0));
  writer_.reset();
}

// Writes all pending entries as one block. Entries that find no room in this shard stay pending for the next one.
template <class OnWritten>
void ShardWriter::flush(OnWritten&& on_written) {
  if (!writer_) open_shard();
  size_t fit = 0;
  if (open_ || open_section()) {
    uint64_t relative[kBlock];
    float sent[kBlock];
    const uint64_t base = tensor_ == first_ ? base_ : 0;
    for (size_t i = 0; i < pending_; ++i) relative[i] = positions_[i] - base;
    fit = writer_->block(relative, values_, pending_, sent);
    on_written(positions_, values_, sent, fit);
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

template <class OnWritten>
void ShardWriter::take(uint64_t position, float value, OnWritten&& on_written) {
  positions_[pending_] = position;
  values_[pending_] = value;
  ++pending_;
  while (pending_ == kBlock) flush(on_written);
}

Written ShardWriter::add_selected(const SectionInput& section, Cutoff cutoff) {
  Written w;
  const auto& [source, n] = section.vector;
  begin(section.id, n, section.format, section.rounding);
  const auto on_written = [&target = section.target](const uint64_t* positions, const float* values, const float* sent,
                                                     size_t count) {
    for (size_t i = 0; i < count && target.kept; ++i) target.kept[positions[i]] = values[i] - sent[i];
    for (size_t i = 0; i < count && target.mask; ++i) target.mask[positions[i]] = 0.0f;
  };
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  for (size_t at = 0; at < n; at += kChunk) {
    const size_t kept = pass(source, at, std::min(kChunk, n - at), cutoff, true, offsets, values, w);
    for (size_t i = 0; i < kept; ++i) take(at + offsets[i], values[i], on_written);
  }
  while (pending_) flush(on_written);
  close_section();
  w.sent = w.selected;
  w.ties = cutoff.ties;
  return w;
}

void ShardWriter::add_entries(const EntriesInput& e) {
  begin(e.id, e.n, e.format, e.rounding);
  float* out = e.sent;
  const auto on_written = [&](const uint64_t*, const float*, const float* sent, size_t count) {
    out = std::copy(sent, sent + count, out);
  };
  for (uint64_t i = 0; i < e.count; ++i) take(e.positions[i], e.values[i], on_written);
  while (pending_) flush(on_written);
  close_section();
}

const std::vector<std::vector<uint8_t>>& ShardWriter::finish() {
  close_shard();
  return shards_;
}

}  // namespace thinwire

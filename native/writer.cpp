// The frame writer. A section's entries stream through blocks of kBlock, while their memory is still in the cache.
#include "writer.hpp"

#include <algorithm>
#include <limits>

#include "positions.hpp"

namespace thinwire {
namespace {

constexpr size_t kMostBlockBytes = kMostPositionBytes + 8 + 4 * kBlock;

size_t put_varint(uint8_t* out, uint64_t x) {
  size_t n = 0;
  for (; x >= 128; x >>= 7) out[n++] = uint8_t(x | 128);
  out[n++] = uint8_t(x);
  return n;
}

// Of the entries equal to the threshold only the first `ties` stay; returns how many entries are left.
size_t drop_ties(uint32_t* offsets, float* values, size_t n, Cut& cut) {
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

}  // namespace

Writer::Writer(uint8_t* buffer, size_t capacity) : buffer_(buffer), capacity_(capacity) {
  if (capacity < kHeaderBytes) throw std::invalid_argument("a frame needs at least 24 bytes");
}

bool Writer::open(uint32_t id, Format format, Indexing indexing, uint64_t n, uint64_t seed, size_t reserve) {
  limit_ = capacity_ > reserve ? capacity_ - reserve : 0;
  if (used_ + kMostSectionHeader > limit_) return false;
  used_ += put_varint(buffer_ + used_, id);
  buffer_[used_++] = uint8_t(unsigned(format) | unsigned(indexing) << 4);
  used_ += put_varint(buffer_ + used_, n);
  count_at_ = used_;
  count_width_ = count_width(n);
  used_ += count_width_;
  if (indexing == Indexing::strata) {
    std::memcpy(buffer_ + used_, &seed, 8);
    used_ += 8;
  }
  format_ = format;
  previous_ = std::numeric_limits<uint64_t>::max();
  ++sections_;
  return true;
}

void Writer::close(uint64_t count) { std::memcpy(buffer_ + count_at_, &count, count_width_); }

bool Writer::block(const uint64_t* positions, const float* values, size_t n, bool with_positions, float* sent) {
  uint8_t scratch[kMostBlockBytes];
  size_t size = with_positions ? write_positions(positions, n, previous_, scratch) : 0;
  if (used_ + size + block_bytes(format_, n) > limit_) return false;
  size += write_block(format_, values, n, rounding_, scratch + size, sent);
  std::memcpy(buffer_ + used_, scratch, size);
  used_ += size;
  rounding_.counter += n;
  previous_ = positions[n - 1];
  return true;
}

bool Writer::flush(const uint64_t* positions, const float* values, size_t n, const Target& target, Written& w) {
  float sent[kBlock];
  if (!block(positions, values, n, true, sent)) return false;
  w.sent += n;
  if (target.held)
    for (size_t i = 0; i < n; ++i) target.held[positions[i]] = values[i] - sent[i];
  if (target.mask)
    for (size_t i = 0; i < n; ++i) target.mask[positions[i]] = 0.0f;
  return true;
}

Written Writer::add_selected(uint32_t id, const Source& source, size_t n, const Target& target, Cut cut,
                             Format format, Rounding rounding, size_t reserve) {
  constexpr float kNever = std::numeric_limits<float>::infinity();
  Written w;
  rounding_ = rounding;
  const bool opened = open(id, format, Indexing::gaps, n, 0, reserve);
  bool room = opened;
  const Scan scan = scan_in_use();
  uint32_t offsets[kChunk + kSlack];
  float chunk[kChunk + kSlack];
  uint64_t positions[kChunk + kBlock];
  float values[kChunk + kBlock];
  size_t pending = 0;
  for (size_t begin = 0; begin < n; begin += kChunk) {
    // Once the frame is full the pass only accumulates: everything from here on stays in the memory.
    const bool ties = room && cut.ties > 0;
    size_t kept = scan(source, begin, std::min(kChunk, n - begin), room ? cut.threshold : kNever, ties, offsets, chunk);
    if (ties) kept = drop_ties(offsets, chunk, kept, cut);
    double magnitudes = 0;
    for (size_t i = 0; i < kept; ++i) {
      positions[pending + i] = begin + offsets[i];
      values[pending + i] = chunk[i];
      magnitudes += magnitude(chunk[i]);
    }
    w.magnitudes += magnitudes;
    w.selected += kept;
    pending += kept;
    size_t done = 0;
    for (; room && pending - done >= kBlock; done += kBlock)
      room = flush(positions + done, values + done, kBlock, target, w);
    if (!room) pending = done = 0;
    if (done) {
      std::copy(positions + done, positions + pending, positions);
      std::copy(values + done, values + pending, values);
      pending -= done;
    }
    if (!room && !source.memory) break;
  }
  if (room && pending) flush(positions, values, pending, target, w);
  if (opened) close(w.sent);
  w.ties = cut.ties;
  return w;
}

// The receiver derives all positions from the seed and the count: all of them fit, or none is sent.
bool Writer::strata_fit(uint64_t count) const {
  const size_t last = count % kBlock;
  const size_t size = count / kBlock * block_bytes(format_, kBlock) + (last ? block_bytes(format_, last) : 0);
  return used_ + size <= limit_;
}

Written Writer::add_strata(uint32_t id, const Source& source, size_t n, const Target& target, uint64_t count,
                           uint64_t seed, Format format, Rounding rounding, size_t reserve) {
  Written w;
  if (source.memory) accumulate(source, n);
  rounding_ = rounding;
  if (!open(id, format, Indexing::strata, n, seed, reserve)) return w;
  if (!strata_fit(count)) count = 0;
  with_dtype(source.memory ? Dtype::float32 : source.dtype, [&]<Dtype D>() {
    const void* data = source.memory ? source.memory : source.gradient;
    const auto* x = static_cast<const typename Load<D>::type*>(data);
    uint64_t positions[kBlock];
    float values[kBlock], sent[kBlock];
    for (uint64_t begin = 0; begin < count; begin += kBlock) {
      const size_t m = std::min<uint64_t>(kBlock, count - begin);
      for (size_t i = 0; i < m; ++i) {
        positions[i] = stratum_position(seed, begin + i, count, n);
        values[i] = Load<D>::at(x, positions[i]);
        w.magnitudes += magnitude(values[i]);
      }
      block(positions, values, m, false, sent);
      for (size_t i = 0; i < m && target.held; ++i) target.held[positions[i]] = values[i] - sent[i];
      for (size_t i = 0; i < m && target.mask; ++i) target.mask[positions[i]] = 0.0f;
    }
  });
  w.sent = w.selected = count;
  close(count);
  return w;
}

Written Writer::add_entries(uint32_t id, const uint64_t* positions, const float* values, uint64_t count, size_t n,
                            float* sent, bool strata, uint64_t seed, Format format, Rounding rounding,
                            size_t reserve) {
  Written w;
  rounding_ = rounding;
  w.selected = count;
  if (!open(id, format, strata ? Indexing::strata : Indexing::gaps, n, seed, reserve)) return w;
  if (strata && !strata_fit(count)) count = 0;
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const size_t m = std::min<uint64_t>(kBlock, count - begin);
    if (!block(positions + begin, values + begin, m, !strata, sent + begin)) break;
    w.sent += m;
  }
  close(w.sent);
  return w;
}

size_t Writer::finish(uint8_t flags) {
  std::memset(buffer_, 0, kHeaderBytes);
  std::memcpy(buffer_, kMagic, 4);
  buffer_[kAtVersion] = kVersion;
  buffer_[kAtFlags] = flags;
  std::memcpy(buffer_ + kAtSections, &sections_, 4);
  const uint64_t length = used_;
  std::memcpy(buffer_ + kAtLength, &length, 8);
  const uint32_t crc = frame_crc(buffer_, used_);
  std::memcpy(buffer_ + kAtCrc, &crc, 4);
  return used_;
}

}  // namespace thinwire

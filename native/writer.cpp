// The frame writer. A section's entries stream through blocks of kBlock, while their memory is still in the cache.
#include "writer.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "pass.hpp"
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

}  // namespace

Writer::Writer(uint8_t* buffer, size_t capacity) : buffer_(buffer), capacity_(capacity) {
  if (capacity < kHeaderBytes) throw std::invalid_argument("a frame needs at least 24 bytes");
}

bool Writer::open(uint32_t id, Format format, Indexing indexing, uint64_t n, uint64_t seed, size_t reserve) {
  limit_ = capacity_ > reserve ? capacity_ - reserve : 0;
  if (used_ + section_header_bytes(id, n, indexing) > limit_) return false;
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

size_t Writer::block(const uint64_t* positions, const float* values, size_t n, bool with_positions, float* sent) {
  uint8_t scratch[kMostBlockBytes];
  size_t size = 0;
  const auto fits = [&](size_t m) {
    size = with_positions ? write_positions(positions, m, previous_, scratch) : 0;
    return used_ + size + block_bytes(format_, m) <= limit_;
  };
  if (!fits(n)) {
    size_t most = 0;  // a power of two at a time, from the largest: the most entries that fit
    for (size_t step = kBlock / 2; step; step /= 2)
      if (most + step < n && fits(most + step)) most += step;
    if (most == 0) return 0;
    fits(n = most);
  }
  size += write_block(format_, values, n, rounding_, scratch + size, sent);
  std::memcpy(buffer_ + used_, scratch, size);
  used_ += size;
  rounding_.counter += n;
  previous_ = positions[n - 1];
  return n;
}

// A section's entries on their way into blocks: whole blocks are written as soon as they are full, and their entries
// settled with the memory.
class Writer::Stream {
 public:
  Stream(Writer& writer, uint32_t id, size_t n, Format format, Rounding rounding, size_t reserve, Deal deal,
         uint64_t owner)
      : writer_(writer), place_(deal, owner), dealt_(deal.world > 1) {
    writer.rounding_ = rounding;
    room = opened_ = (n || !dealt_) && writer.open(id, format, Indexing::gaps, n, 0, reserve);
  }

  void take(uint64_t position, float value, const Target& target) {
    positions_[pending_] = position;
    values_[pending_] = value;
    if (++pending_ < kBlock) return;
    room = flush(target);
    pending_ = 0;
  }

  // Many at once, at offsets from a begin.
  void take(uint64_t begin, const uint32_t* offsets, const float* values, size_t n, const Target& target) {
    for (size_t done = 0; done < n && room;) {
      const size_t some = std::min(kBlock - pending_, n - done);
      for (size_t i = 0; i < some; ++i) positions_[pending_ + i] = begin + offsets[done + i];
      std::memcpy(values_ + pending_, values + done, some * sizeof(float));
      done += some;
      pending_ += some;
      if (pending_ < kBlock) return;
      room = flush(target);
      pending_ = 0;
    }
  }

  // Returns the entries that found room.
  uint64_t finish(const Target& target) {
    if (room && pending_) flush(target);
    if (opened_) writer_.close(sent_);
    return sent_;
  }

  bool room;  // whether another entry may fit

 private:
  bool flush(const Target& target) {
    float sent[kBlock];
    const size_t fit = writer_.block(positions_, values_, pending_, true, sent);
    sent_ += fit;
    if (dealt_)
      settle(fit, target, sent, place_);
    else
      settle(fit, target, sent, [](uint64_t position) { return position; });
    return fit == pending_;  // a shorter block is the section's last
  }

  template <class Place>
  void settle(size_t n, const Target& target, const float* sent, Place&& place) {
    for (size_t i = 0; i < n; ++i) {
      const uint64_t at = place(positions_[i]);
      if (target.held) target.held[at] = values_[i] - sent[i];
      if (target.mask) target.mask[at] = 0.0f;
    }
  }

  Writer& writer_;
  Placed place_;
  bool dealt_, opened_;
  size_t pending_ = 0;
  uint64_t sent_ = 0;
  uint64_t positions_[kBlock];
  float values_[kBlock];
};

Written Writer::add_selected(uint32_t id, const Source& source, size_t n, const Target& target, Cut cut,
                             Format format, Rounding rounding, size_t reserve) {
  Written w;
  Stream stream(*this, id, n, format, rounding, reserve, Deal{}, 0);
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  for (size_t begin = 0; begin < n && (stream.room || source.memory); begin += kChunk) {
    const size_t kept = pass(source, begin, std::min(kChunk, n - begin), cut, stream.room, offsets, values, w);
    stream.take(begin, offsets, values, kept, target);
  }
  w.sent = stream.finish(target);
  w.ties = cut.ties;
  return w;
}

Written Writer::add_dealt(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves, const Deal& deal,
                          uint32_t id, const Source& source, size_t n, const Target& target, Cut cut, Format format,
                          Rounding rounding) {
  Written w;
  std::vector<std::unique_ptr<Stream>> streams;
  for (size_t i = 0; i < owners.size(); ++i)
    streams.emplace_back(new Stream(*owners[i], id, deal.share(n, i), format, rounding, reserves[i], deal, i));
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  Dealer dealer(deal);
  for (size_t begin = 0; begin < n; begin += kChunk) {
    const size_t kept = pass(source, begin, std::min(kChunk, n - begin), cut, true, offsets, values, w);
    for (size_t i = 0; i < kept; ++i) {
      uint64_t position;
      Stream& stream = *streams[dealer(begin + offsets[i], position)];
      if (stream.room) stream.take(position, values[i], target);
    }
  }
  for (auto& stream : streams) w.sent += stream->finish(target);
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
    const size_t fit = block(positions + begin, values + begin, m, !strata, sent + begin);
    w.sent += fit;
    if (fit < m) break;
  }
  close(w.sent);
  return w;
}

size_t Writer::finish(uint8_t flags, bool pad) {
  std::memset(buffer_, 0, kHeaderBytes);
  std::memcpy(buffer_, kMagic, 4);
  buffer_[kAtVersion] = kVersion;
  buffer_[kAtFlags] = flags;
  std::memcpy(buffer_ + kAtSections, &sections_, 4);
  const uint64_t length = used_;
  std::memcpy(buffer_ + kAtLength, &length, 8);
  const uint32_t crc = frame_crc(buffer_, used_);
  std::memcpy(buffer_ + kAtCrc, &crc, 4);
  if (pad) std::memset(buffer_ + used_, 0, capacity_ - used_);
  return used_;
}

}  // namespace thinwire

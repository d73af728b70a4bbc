// The writer of a frame. Entries are collected into blocks and written while their residuals are still in the cache.
#include "writer.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "pass.hpp"
#include "positions.hpp"

namespace thinwire {
namespace {

constexpr size_t kMaxBlockBytes = kMaxPositionBytes + 8 + 4 * kBlock;

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

bool Writer::open(uint32_t id, Format format, Indexing indexing, uint64_t n, uint64_t origin, size_t reserve) {
  limit_ = capacity_ > reserve ? capacity_ - reserve : 0;
  if (used_ + section_header_bytes(id, n, indexing) > limit_) return false;
  used_ += put_varint(buffer_ + used_, id);
  buffer_[used_++] = uint8_t(unsigned(format) | unsigned(indexing) << 4);
  used_ += put_varint(buffer_ + used_, n);
  count_at_ = used_;
  count_width_ = count_width(n);
  used_ += count_width_;
  std::memcpy(buffer_ + used_, &origin, origin_width(indexing, n));
  used_ += origin_width(indexing, n);
  format_ = format;
  previous_ = std::numeric_limits<uint64_t>::max();
  ++sections_;
  return true;
}

bool Writer::open_window(uint32_t id, Format format, uint64_t n, Window window, size_t reserve) {
  const size_t least = section_header_bytes(id, n, Indexing::window) + block_bytes(format, 1);
  if (window.count == 0 || used_ + least + reserve > capacity_) return false;
  return open(id, format, Indexing::window, n, window.start, reserve);
}

void Writer::close(uint64_t count) { std::memcpy(buffer_ + count_at_, &count, count_width_); }

size_t Writer::block(const uint64_t* positions, const float* values, size_t n, float* sent) {
  uint8_t scratch[kMaxBlockBytes];
  size_t size = 0;
  // The size of some formats depends on the values: a block is written before it is known whether it fits.
  const auto fits = [&](size_t m) {
    size = positions ? write_positions(positions, m, previous_, scratch) : 0;
    size += write_block(format_, values, m, rounding_, scratch + size, sent);
    return used_ + size <= limit_;
  };
  if (!fits(n)) {
    size_t most = 0;  // binary search for the most entries that fit
    for (size_t step = kBlock / 2; step; step /= 2)
      if (most + step < n && fits(most + step)) most += step;
    if (most == 0) return 0;
    fits(n = most);
  }
  std::memcpy(buffer_ + used_, scratch, size);
  used_ += size;
  rounding_.counter += n;
  if (positions) previous_ = positions[n - 1];
  return n;
}

// Collects a section's entries into blocks. A block is written as soon as it is full; its entries are then removed from
// the residual.
class Writer::Stream {
 public:
  Stream(Writer& writer, const SectionInput& section, size_t n, size_t reserve, Partition partition, uint64_t owner)
      : writer_(writer), to_whole_(partition, owner), split_(partition.world > 1) {
    writer.rounding_ = section.rounding;
    room = opened_ = (n || !split_) && writer.open(section.id, section.format, Indexing::gaps, n, 0, reserve);
  }

  void take(uint64_t position, float value, const Target& target) {
    positions_[pending_] = position;
    values_[pending_] = value;
    if (++pending_ < kBlock) return;
    room = flush(target);
    pending_ = 0;
  }

  // Takes many entries, at offsets from `begin`.
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

  // Returns how many entries found room.
  uint64_t finish(const Target& target) {
    if (room && pending_) flush(target);
    if (opened_) writer_.close(sent_);
    return sent_;
  }

  bool room;  // whether more entries may fit

 private:
  bool flush(const Target& target) {
    float sent[kBlock];
    const size_t fit = writer_.block(positions_, values_, pending_, sent);
    sent_ += fit;
    if (split_)
      remove(fit, target, sent, to_whole_);
    else
      remove(fit, target, sent, [](uint64_t position) { return position; });
    return fit == pending_;  // a shorter block ends the section
  }

  // Leaves only the rounding error of the first n entries in the residual.
  template <class ToWhole>
  void remove(size_t n, const Target& target, const float* sent, ToWhole&& to_whole) {
    for (size_t i = 0; i < n; ++i) {
      const uint64_t at = to_whole(positions_[i]);
      if (target.kept) target.kept[at] = values_[i] - sent[i];
      if (target.mask) target.mask[at] = 0.0f;
    }
  }

  Writer& writer_;
  ShareToWhole to_whole_;
  bool split_, opened_;
  size_t pending_ = 0;
  uint64_t sent_ = 0;
  uint64_t positions_[kBlock];
  float values_[kBlock];
};

Written Writer::add_selected(const SectionInput& section, Cutoff cutoff, size_t reserve) {
  Written w;
  const auto& [source, n] = section.vector;
  Stream stream(*this, section, n, reserve, Partition{}, 0);
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  for (size_t begin = 0; begin < n && (stream.room || source.residual); begin += kChunk) {
    const size_t kept = pass(source, begin, std::min(kChunk, n - begin), cutoff, stream.room, offsets, values, w);
    stream.take(begin, offsets, values, kept, section.target);
  }
  w.sent = stream.finish(section.target);
  w.ties = cutoff.ties;
  return w;
}

Written Writer::add_parts(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves,
                          const Partition& partition, const SectionInput& section, Cutoff cutoff) {
  Written w;
  const auto& [source, n] = section.vector;
  std::vector<std::unique_ptr<Stream>> streams;
  for (size_t i = 0; i < owners.size(); ++i)
    streams.emplace_back(new Stream(*owners[i], section, partition.share(n, i), reserves[i], partition, i));
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  OwnerLookup owner_of(partition);
  for (size_t begin = 0; begin < n; begin += kChunk) {
    const size_t kept = pass(source, begin, std::min(kChunk, n - begin), cutoff, true, offsets, values, w);
    for (size_t i = 0; i < kept; ++i) {
      uint64_t position;
      Stream& stream = *streams[owner_of(begin + offsets[i], position)];
      if (stream.room) stream.take(position, values[i], section.target);
    }
  }
  for (auto& stream : streams) w.sent += stream->finish(section.target);
  w.ties = cutoff.ties;
  return w;
}

// The receiver derives all positions from the seed and the count. Therefore either all of them are sent, or none.
bool Writer::strata_fit(uint64_t count) const {
  const size_t last = count % kBlock;
  const size_t size = count / kBlock * block_bytes(format_, kBlock) + (last ? block_bytes(format_, last) : 0);
  return used_ + size <= limit_;
}

Written Writer::add_strata(const SectionInput& section, uint64_t count, uint64_t seed, size_t reserve) {
  Written w;
  const auto& [source, n] = section.vector;
  const Target& target = section.target;
  if (source.residual) accumulate(source, 0, n);
  rounding_ = section.rounding;
  if (!open(section.id, section.format, Indexing::strata, n, seed, reserve)) return w;
  if (!strata_fit(count)) count = 0;
  with_dtype(source.residual ? Dtype::float32 : source.dtype, [&, &source = source, n = n]<Dtype D>() {
    const void* data = source.residual ? source.residual : source.gradient;
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
      block(nullptr, values, m, sent);
      for (size_t i = 0; i < m && target.kept; ++i) target.kept[positions[i]] = values[i] - sent[i];
      for (size_t i = 0; i < m && target.mask; ++i) target.mask[positions[i]] = 0.0f;
    }
  });
  w.sent = w.selected = count;
  close(count);
  return w;
}

// Writes the n elements of a window of a share of the vector, as far as there is room. to_whole(i) is the element's
// place in the vector; prepare(begin, end) is called before these elements of the share are read.
template <class Prepare, class ToWhole>
void Writer::add_window_blocks(const SectionInput& section, uint64_t n, Window window, size_t reserve,
                               Prepare&& prepare, ToWhole&& to_whole, Written& w) {
  const Source& source = section.vector.source;
  const Target& target = section.target;
  rounding_ = section.rounding;
  const bool opened = open_window(section.id, section.format, n, window, reserve);
  bool room = opened;
  uint64_t written = 0;
  with_dtype(source.residual ? Dtype::float32 : source.dtype, [&]<Dtype D>() {
    const void* data = source.residual ? source.residual : source.gradient;
    const auto* x = static_cast<const typename Load<D>::type*>(data);
    float values[kBlock], sent[kBlock];
    for (uint64_t done = 0; done < window.count; done += kBlock) {
      const uint64_t begin = window.start + done;
      const size_t m = std::min<uint64_t>(kBlock, window.count - done);
      prepare(begin, begin + m);
      if (!room) continue;
      for (size_t i = 0; i < m; ++i) values[i] = Load<D>::at(x, to_whole(begin + i));
      const size_t fit = block(nullptr, values, m, sent);
      for (size_t i = 0; i < fit && target.kept; ++i) target.kept[to_whole(begin + i)] = values[i] - sent[i];
      for (size_t i = 0; i < fit && target.mask; ++i) target.mask[to_whole(begin + i)] = 0.0f;
      w.magnitudes += sum_of_magnitudes(values, m);
      written += fit;
      room = fit == m;
    }
  });
  w.selected += window.count;
  w.sent += written;
  if (opened) close(written);
}

Written Writer::add_window(const SectionInput& section, Window window, size_t reserve) {
  Written w;
  const auto& [source, n] = section.vector;
  // The window's blocks are accumulated one by one, so that they are in the cache when they are written.
  const auto prepare = [&source = source](uint64_t begin, uint64_t end) {
    if (source.residual) accumulate(source, begin, end);
  };
  prepare(0, window.start);
  add_window_blocks(section, n, window, reserve, prepare, [](uint64_t position) { return position; }, w);
  prepare(window.start + window.count, n);
  return w;
}

Written Writer::add_window_parts(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves,
                                 const Partition& partition, const SectionInput& section, Window window) {
  Written w;
  const auto& [source, n] = section.vector;
  if (source.residual) accumulate(source, 0, n);
  for (size_t i = 0; i < owners.size(); ++i) {
    const uint64_t start = partition.share(window.start, i);
    const uint64_t count = partition.share(window.start + window.count, i) - start;
    owners[i]->add_window_blocks(
        section, partition.share(n, i), {start, count}, reserves[i], [](uint64_t, uint64_t) {},
        ShareToWhole(partition, i), w);
  }
  return w;
}

uint64_t Writer::blocks_of(const EntriesInput& e, uint64_t count, bool with_positions) {
  uint64_t written = 0;
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const size_t m = std::min<uint64_t>(kBlock, count - begin);
    const size_t fit = block(with_positions ? e.positions + begin : nullptr, e.values + begin, m, e.sent + begin);
    written += fit;
    if (fit < m) break;
  }
  close(written);
  return written;
}

uint64_t Writer::add_entries(const EntriesInput& e, std::optional<uint64_t> seed, size_t reserve) {
  rounding_ = e.rounding;
  if (!open(e.id, e.format, seed ? Indexing::strata : Indexing::gaps, e.n, seed.value_or(0), reserve)) return 0;
  return blocks_of(e, seed && !strata_fit(e.count) ? 0 : e.count, !seed);
}

uint64_t Writer::add_window_entries(const EntriesInput& e, size_t reserve) {
  rounding_ = e.rounding;
  const Window window{e.count ? e.positions[0] : 0, e.count};
  return open_window(e.id, e.format, e.n, window, reserve) ? blocks_of(e, e.count, false) : 0;
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

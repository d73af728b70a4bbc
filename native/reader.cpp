// The frame reader. Every count is checked against what the receiver knows and what the bytes can hold before memory
// is taken for it.
#include "reader.hpp"

#include <algorithm>

#include "positions.hpp"

namespace thinwire {
namespace {

// Room for all entries of a section at once, or twice what there was: sections are many, copies must be few.
template <class P>
void make_room(P& positions, uint64_t count) {
  const size_t wanted = positions.size() + size_t(count);
  if (wanted > positions.capacity()) positions.reserve(std::max(wanted, 2 * positions.capacity()));
}

}  // namespace

class Reader::Cursor {
 public:
  Cursor(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}
  const uint8_t* at() const { return at_; }
  const uint8_t* end() const { return end_; }
  size_t left() const { return size_t(end_ - at_); }
  void need(size_t n, const char* what) const {
    if (left() < n) throw FrameFault(std::string("the frame ends within ") + what);
  }
  void skip(size_t n) { at_ += n; }
  uint8_t byte(const char* what) {
    need(1, what);
    return *at_++;
  }
  uint64_t fixed(unsigned width, const char* what) {
    need(width, what);
    uint64_t x = 0;
    std::memcpy(&x, at_, width);
    at_ += width;
    return x;
  }
  uint64_t varint(const char* what) {
    uint64_t x = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const uint8_t b = byte(what);
      if (shift == 63 && b > 1) break;
      if (shift && b == 0) throw FrameFault(std::string("a number is not in its shortest form in ") + what);
      x |= uint64_t(b & 127) << shift;
      if (b < 128) return x;
    }
    throw FrameFault(std::string("a number is longer than 64 bits in ") + what);
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

void Reader::read(const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels, bool trailing) {
  sections_.clear();
  blocks_.clear();
  positions32_.clear();
  positions64_.clear();
  read_header(frame, size, trailing);
  Cursor cursor(frame + kHeaderBytes, frame + length_);
  int64_t last_id = -1;
  for (uint32_t i = 0; i < section_count_; ++i) read_section(cursor, numels, last_id);
  if (cursor.left()) throw FrameFault("bytes are left after the last section");
}

void Reader::read_header(const uint8_t* frame, size_t size, bool trailing) {
  if (size < kHeaderBytes) throw FrameFault("the frame is shorter than its header of 24 bytes");
  if (std::memcmp(frame, kMagic, 4) != 0) throw FrameFault("the bytes do not begin with a frame's magic 'TWFR'");
  if (frame[kAtVersion] != kVersion)
    throw FrameFault("the frame has version " + std::to_string(frame[kAtVersion]) + ", this thinwire reads version " +
                     std::to_string(kVersion));
  uint64_t length;
  std::memcpy(&length, frame + kAtLength, 8);
  if (length < kHeaderBytes) throw FrameFault("the header's length is shorter than the header");
  if (length > size)
    throw FrameFault("the frame is truncated: " + std::to_string(size) + " of " + std::to_string(length) + " bytes");
  if (length < size && !trailing)
    throw FrameFault(std::to_string(size - length) + " bytes follow the end of the frame");
  length_ = size_t(length);
  uint32_t crc;
  std::memcpy(&crc, frame + kAtCrc, 4);
  if (crc != frame_crc(frame, length_)) throw FrameFault("the checksum does not match: the frame is corrupt");
  flags_ = frame[kAtFlags];
  if ((flags_ & ~kNonFinite) || frame[kAtReserved] || frame[kAtReserved + 1])
    throw FrameFault("a reserved bit of the header is set");
  std::memcpy(&section_count_, frame + kAtSections, 4);
  if ((flags_ & kNonFinite) && section_count_) throw FrameFault("a frame marked as not finite has sections");
}

void Reader::read_section(Cursor& cursor, const std::vector<uint64_t>& numels, int64_t& last_id) {
  Section s{};
  const uint64_t id = cursor.varint("a section's id");
  if (id >= numels.size())
    throw FrameFault("section " + std::to_string(id) + " is unknown: the receiver has " +
                     std::to_string(numels.size()) + " tensors");
  if (int64_t(id) <= last_id) throw FrameFault("section " + std::to_string(id) + " is repeated or out of order");
  last_id = int64_t(id);
  s.id = uint32_t(id);
  const uint8_t kind = cursor.byte("a section's kind");
  if ((kind & 15) >= kFormats) throw FrameFault("value format " + std::to_string(kind & 15) + " is unknown");
  if (kind >> 4 > 1) throw FrameFault("index coding " + std::to_string(kind >> 4) + " is unknown");
  s.format = Format(kind & 15);
  s.indexing = Indexing(kind >> 4);
  s.numel = cursor.varint("a section's size");
  if (s.numel != numels[id])
    throw FrameFault("section " + std::to_string(id) + " has " + std::to_string(s.numel) +
                     " elements, the receiver's tensor has " + std::to_string(numels[id]));
  s.count = cursor.fixed(count_width(s.numel), "a section's count");
  if (s.count > s.numel)
    throw FrameFault("section " + std::to_string(id) + " claims " + std::to_string(s.count) + " entries of " +
                     std::to_string(s.numel) + " elements");
  const uint64_t seed = s.indexing == Indexing::strata ? cursor.fixed(8, "a section's seed") : 0;
  // Each entry takes at least one bit: a larger count is a lie, found before memory is taken.
  if (s.count / 8 > cursor.left())
    throw FrameFault("section " + std::to_string(id) + " claims more entries than its bytes can hold");
  s.first_block = blocks_.size();
  if (s.numel > ~uint32_t(0))
    make_room(positions64_, s.count);
  else
    make_room(positions32_, s.count);
  s.indexing == Indexing::strata ? read_strata(cursor, s, seed) : read_gaps(cursor, s);
  s.blocks = blocks_.size() - s.first_block;
  sections_.push_back(s);
}

template <class Position>
void Reader::take_gaps(Cursor& cursor, const Section& s, Block& b, uint8_t coding, uint64_t& previous,
                       Positions<Position>& positions) {
  b.begin = positions.size();
  positions.resize(positions.size() + b.count);
  const char* error = nullptr;
  const size_t read = read_positions(coding, cursor.at(), cursor.end(), b.count, previous, s.numel,
                                     positions.data() + b.begin, &error);
  if (error) throw FrameFault(error);
  cursor.skip(read);
  previous = positions.back();
}

void Reader::read_gaps(Cursor& cursor, const Section& s) {
  uint64_t previous = ~uint64_t(0);
  const bool wide = s.numel > ~uint32_t(0);
  for (uint64_t done = 0; done < s.count; done += kBlock) {
    Block b{};
    b.count = uint32_t(std::min<uint64_t>(kBlock, s.count - done));
    const uint8_t coding = cursor.byte("a block's coding");
    b.run = coding == kRun;
    if (b.run) {
      b.begin = previous + 1;
      if (b.count > s.numel - b.begin) throw FrameFault("a position lies outside of its tensor");
      previous += b.count;
    } else if (coding > kLastParameter) {
      throw FrameFault("index coding " + std::to_string(coding) + " of a block is unknown");
    } else if (wide) {
      take_gaps(cursor, s, b, coding, previous, positions64_);
    } else {
      take_gaps(cursor, s, b, coding, previous, positions32_);
    }
    cursor.need(block_bytes(s.format, b.count), "a block's values");
    if (const char* error = check_block(s.format, cursor.at(), b.count)) throw FrameFault(error);
    b.values = cursor.at();
    cursor.skip(block_bytes(s.format, b.count));
    blocks_.push_back(b);
  }
}

void Reader::read_strata(Cursor& cursor, const Section& s, uint64_t seed) {
  const bool wide = s.numel > ~uint32_t(0);
  for (uint64_t done = 0; done < s.count; done += kBlock) {
    Block b{};
    b.count = uint32_t(std::min<uint64_t>(kBlock, s.count - done));
    b.begin = wide ? positions64_.size() : positions32_.size();
    cursor.need(block_bytes(s.format, b.count), "a block's values");
    if (const char* error = check_block(s.format, cursor.at(), b.count)) throw FrameFault(error);
    for (uint32_t i = 0; i < b.count; ++i) {
      const uint64_t position = stratum_position(seed, done + i, s.count, s.numel);
      wide ? positions64_.push_back(position) : positions32_.push_back(uint32_t(position));
    }
    b.values = cursor.at();
    cursor.skip(block_bytes(s.format, b.count));
    blocks_.push_back(b);
  }
}

// Calls visit(position_of, values, count, ahead) for each block: position_of(i) gives the place of its i-th entry and
// may be asked for `ahead` entries, those of later blocks included.
template <class F>
void Reader::for_blocks(const Section& s, F&& visit) const {
  float values[kBlock];
  for (size_t at = s.first_block; at < s.first_block + s.blocks; ++at) {
    const Block& b = blocks_[at];
    read_block(s.format, b.values, b.count, values);
    if (b.run) {
      visit([&](size_t i) { return b.begin + i; }, values, b.count, size_t(0));
    } else if (s.numel > ~uint32_t(0)) {
      const uint64_t* p = positions64_.data() + b.begin;
      visit([=](size_t i) { return p[i]; }, values, b.count, positions64_.size() - b.begin);
    } else {
      const uint32_t* p = positions32_.data() + b.begin;
      visit([=](size_t i) { return uint64_t(p[i]); }, values, b.count, positions32_.size() - b.begin);
    }
  }
}

void Reader::add(const Section& s, float* out, float weight) const {
  constexpr size_t kAhead = 96;  // lines fetched ahead: the scattered additions wait for memory otherwise
  for_blocks(s, [&](auto position, const float* values, size_t n, size_t ahead) {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < ahead) __builtin_prefetch(out + position(i + kAhead), 1);
      out[position(i)] += values[i] * weight;
    }
  });
}

void Reader::entries(const Section& s, uint64_t* positions, float* values) const {
  for_blocks(s, [&](auto position, const float* from, size_t n, size_t) {
    for (size_t i = 0; i < n; ++i) positions[i] = position(i);
    std::copy(from, from + n, values);
    positions += n;
    values += n;
  });
}

}  // namespace thinwire

// The frame reader. Every count is checked against the receiver's sizes and the number of bytes before memory is
// allocated for it.
#include "reading.hpp"

#include <algorithm>
#include <exception>
#include <optional>

namespace thinwire {
namespace {

// Reserves memory for all entries of a section, at least twice the old capacity, so that few copies are made.
template <class P>
void make_room(P& positions, uint64_t count) {
  const size_t wanted = positions.size() + size_t(count);
  if (wanted > positions.capacity()) positions.reserve(std::max(wanted, 2 * positions.capacity()));
}

}  // namespace

Reader::Reading::Reading(Reader& reader, const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels,
                         bool trailing)
    : reader_(reader), numels_(numels) {
  reader_.sections_.clear();
  reader_.blocks_.clear();
  reader_.positions32_.clear();
  reader_.positions64_.clear();
  read_header(frame, size, trailing);
  cursor_ = Cursor(frame + kHeaderBytes, frame + reader_.length_);
}

bool Reader::Reading::next() {
  if (coded_) {
    coded_ = false;
    take(gaps_);
    close_block();
  }
  for (;;) {
    for (; done_ < section_.count; close_block())
      if ((coded_ = open_block())) return true;
    if (open_) close_section();
    if (left_ == 0) break;
    open_section();
  }
  if (cursor_.left()) throw FrameFault("bytes are left after the last section");
  return false;
}

void Reader::Reading::read_header(const uint8_t* frame, size_t size, bool trailing) {
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
  reader_.length_ = size_t(length);
  uint32_t crc;
  std::memcpy(&crc, frame + kAtCrc, 4);
  if (crc != frame_crc(frame, reader_.length_)) throw FrameFault("the checksum does not match: the frame is corrupt");
  reader_.flags_ = frame[kAtFlags];
  if ((reader_.flags_ & ~kNonFinite) || frame[kAtReserved] || frame[kAtReserved + 1])
    throw FrameFault("a reserved bit of the header is set");
  std::memcpy(&left_, frame + kAtSections, 4);
  if ((reader_.flags_ & kNonFinite) && left_) throw FrameFault("a frame marked as not finite has sections");
}

void Reader::Reading::open_section() {
  Section& s = section_ = {};
  open_ = true;
  --left_;
  const uint64_t id = cursor_.varint("a section's id");
  if (id >= numels_.size())
    throw FrameFault("section " + std::to_string(id) + " is unknown: the receiver has " +
                     std::to_string(numels_.size()) + " tensors");
  if (int64_t(id) <= last_id_) throw FrameFault("section " + std::to_string(id) + " is repeated or out of order");
  last_id_ = int64_t(id);
  s.id = uint32_t(id);
  const uint8_t kind = cursor_.byte("a section's kind");
  if ((kind & 15) >= kFormats) throw FrameFault("value format " + std::to_string(kind & 15) + " is unknown");
  if (kind >> 4 >= kIndexings) throw FrameFault("index coding " + std::to_string(kind >> 4) + " is unknown");
  s.format = Format(kind & 15);
  s.indexing = Indexing(kind >> 4);
  s.numel = cursor_.varint("a section's size");
  if (s.numel != numels_[id])
    throw FrameFault("section " + std::to_string(id) + " has " + std::to_string(s.numel) +
                     " elements, the receiver's tensor has " + std::to_string(numels_[id]));
  s.count = cursor_.fixed(count_width(s.numel), "a section's count");
  if (s.count > s.numel)
    throw FrameFault("section " + std::to_string(id) + " claims " + std::to_string(s.count) + " entries of " +
                     std::to_string(s.numel) + " elements");
  const bool windowed = s.indexing == Indexing::window;
  const char* what = windowed ? "a section's start" : "a section's seed";
  const uint64_t origin = cursor_.fixed(origin_width(s.indexing, s.numel), what);
  if (windowed && origin > s.numel - s.count) throw FrameFault("a window lies outside of its tensor");
  // Each entry takes at least one bit. A larger count is refused before memory is allocated.
  if (s.count / 8 > cursor_.left())
    throw FrameFault("section " + std::to_string(id) + " claims more entries than its bytes can hold");
  s.first_block = reader_.blocks_.size();
  done_ = 0;
  previous_ = ~uint64_t(0);
  if (windowed) return read_window(origin);
  if (s.numel > ~uint32_t(0))
    make_room(reader_.positions64_, s.count);
  else
    make_room(reader_.positions32_, s.count);
  if (s.indexing == Indexing::strata) read_strata(origin);
}

void Reader::Reading::close_section() {
  section_.blocks = reader_.blocks_.size() - section_.first_block;
  reader_.sections_.push_back(section_);
  open_ = false;
}

// Reads the coding of the next block. Returns true if the caller is to read the positions, else it has read them.
bool Reader::Reading::open_block() {
  block_ = {};
  block_.count = uint16_t(std::min<uint64_t>(kBlock, section_.count - done_));
  const uint8_t coding = cursor_.byte("a block's coding");
  block_.run = coding == kRun;
  if (block_.run) {
    block_.begin = previous_ + 1;
    if (block_.count > section_.numel - block_.begin) throw FrameFault("a position lies outside of its tensor");
    previous_ += block_.count;
    return false;
  }
  if (coding > kLastParameter) throw FrameFault("index coding " + std::to_string(coding) + " of a block is unknown");
  if (section_.numel > ~uint32_t(0)) {
    auto gaps = gaps_of_block(coding, reader_.positions64_);
    read_positions(gaps);
    take(gaps);
    return false;
  }
  gaps_ = gaps_of_block(coding, reader_.positions32_);
  return true;
}

template <class Position>
Gaps<Position> Reader::Reading::gaps_of_block(uint8_t coding, Positions<Position>& positions) {
  block_.begin = positions.size();
  positions.resize(positions.size() + block_.count);
  Position* out = positions.data() + block_.begin;
  return {coding, cursor_.at(), cursor_.end(), block_.count, previous_, section_.numel, out};
}

template <class Position>
void Reader::Reading::take(const Gaps<Position>& gaps) {
  if (gaps.error) throw FrameFault(gaps.error);
  cursor_.skip(gaps.read);
  previous_ = gaps.out[gaps.n - 1];
}

void Reader::Reading::close_block() {
  size_t bytes = 0;
  const char* error = check_block(section_.format, cursor_.at(), cursor_.left(), block_.count, bytes);
  if (error) throw FrameFault(error);
  block_.values = cursor_.at();
  block_.bytes = uint16_t(bytes);
  cursor_.skip(bytes);
  reader_.blocks_.push_back(block_);
  done_ += block_.count;
}

void Reader::Reading::read_strata(uint64_t seed) {
  const Section& s = section_;
  const auto read_into = [&](auto& positions) {
    while (done_ < s.count) {
      block_ = {};
      block_.count = uint16_t(std::min<uint64_t>(kBlock, s.count - done_));
      block_.begin = positions.size();
      uint64_t j = done_;
      close_block();
      for (; j < done_; ++j) positions.push_back(stratum_position(seed, j, s.count, s.numel));
    }
  };
  s.numel > ~uint32_t(0) ? read_into(reader_.positions64_) : read_into(reader_.positions32_);
}

void Reader::Reading::read_window(uint64_t start) {
  while (done_ < section_.count) {
    block_ = {};
    block_.count = uint16_t(std::min<uint64_t>(kBlock, section_.count - done_));
    block_.begin = start + done_;
    block_.run = true;
    close_block();
  }
}

void Reader::read(const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels, bool trailing) {
  Reading reading(*this, frame, size, numels, trailing);
  while (reading.next()) read_positions(reading.gaps());
}

void read_frames(const std::vector<Message>& messages, std::vector<Reader>& readers, bool trailing) {
  size_t begun = 0, bad = messages.size();  // messages from the first bad one on are not begun
  std::exception_ptr fault;
  struct Turn {
    size_t message = 0;
    std::optional<Reader::Reading> reading = {};
  };
  // Advances to the next block of coded gaps, of the same frame or of the next one that was not begun.
  const auto go_on = [&](Turn& turn) {
    for (;; turn.reading.reset()) {
      try {
        if (!turn.reading) {
          if (begun >= bad) return false;
          const Message& m = messages[turn.message = begun++];
          turn.reading.emplace(readers[turn.message], m.frame, m.size, *m.numels, trailing);
        }
        if (turn.reading->next()) return true;
      } catch (const std::exception&) {  // not thrown yet: the other turn's frame may be an earlier one and bad, too
        if (turn.message < bad) fault = std::current_exception(), bad = turn.message;
      }
    }
  };
  Turn one, other;
  bool more = go_on(one), others = go_on(other);
  while (more && others) {
    read_positions(one.reading->gaps(), other.reading->gaps());
    more = go_on(one);
    others = go_on(other);
  }
  for (; more; more = go_on(one)) read_positions(one.reading->gaps());
  for (; others; others = go_on(other)) read_positions(other.reading->gaps());
  if (fault) std::rethrow_exception(fault);
}

}  // namespace thinwire

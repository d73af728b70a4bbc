// Reads frames block by block, so that two frames can be read in turns.
#pragma once
#include "positions.hpp"
#include "reader.hpp"

namespace thinwire {

// The bytes from a position to the frame's end.
class Cursor {
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

class Reader::Reading {
 public:
  // Reads the header. All functions throw FrameFault.
  Reading(Reader&, const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels, bool trailing);
  // Advances to the next block of coded gaps, which the caller must read before the next call. False after the last.
  bool next();
  Gaps<uint32_t>& gaps() { return gaps_; }

 private:
  void read_header(const uint8_t* frame, size_t size, bool trailing);
  void open_section();
  void close_section();
  bool open_block();
  void close_block();
  template <class Position>
  Gaps<Position> gaps_of_block(uint8_t coding, Positions<Position>&);
  template <class Position>
  void take(const Gaps<Position>&);
  void read_strata(uint64_t seed);
  void read_window(uint64_t start);

  Reader& reader_;
  const std::vector<uint64_t>& numels_;
  Cursor cursor_{nullptr, nullptr};
  uint32_t left_ = 0;  // sections that are still to be read
  int64_t last_id_ = -1;
  // The current section, how many of its entries were read, and the position of the last one.
  bool open_ = false;
  Section section_{};
  uint64_t done_ = 0, previous_ = 0;
  // The current block, and whether the caller is to read its gaps.
  Block block_{};
  bool coded_ = false;
  Gaps<uint32_t> gaps_{};
};

struct Message {
  const uint8_t* frame;
  size_t size;
  const std::vector<uint64_t>* numels;
};

// Reads messages[i] into readers[i]. Throws the fault of the first message that has one.
void read_frames(const std::vector<Message>&, std::vector<Reader>&, bool trailing);

}  // namespace thinwire

// Validates a frame from first to last byte, then reads it; nothing is written before everything is known good.
#pragma once
#include <vector>

#include "frame.hpp"
#include "values.hpp"

namespace thinwire {

struct Section {
  uint32_t id;
  Format format;
  Indexing indexing;
  uint64_t numel;
  uint64_t count;
  size_t first_block, blocks;
};

class Reader {
 public:
  // numels: the sizes of the tensors that the receiver expects, by id. Throws FrameFault.
  // trailing: bytes after the frame are allowed (padding of collectives of a fixed size).
  Reader(const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels, bool trailing);

  const std::vector<Section>& sections() const { return sections_; }
  uint8_t flags() const { return flags_; }
  size_t length() const { return length_; }

  // out[position] += weight * value for one section.
  void add(const Section&, float* out, float weight) const;
  void entries(const Section&, uint64_t* positions, float* values) const;

 private:
  struct Block {
    const uint8_t* values;
    uint64_t begin;  // kRun: the first position; else the index into positions32_ or positions64_
    uint32_t count;
    bool run;
  };
  class Cursor;
  void read_header(const uint8_t* frame, size_t size, bool trailing);
  void read_section(Cursor&, const std::vector<uint64_t>& numels, int64_t& last_id);
  void read_gaps(Cursor&, const Section&);
  void read_strata(Cursor&, const Section&, uint64_t seed);
  template <class Position>
  void take_gaps(Cursor&, const Section&, Block&, uint8_t coding, uint64_t& previous, std::vector<Position>&);
  template <class F>
  void for_blocks(const Section&, F&&) const;

  std::vector<Section> sections_;
  std::vector<Block> blocks_;
  // Positions take four bytes while they can: half the memory and half the traffic.
  std::vector<uint32_t> positions32_;
  std::vector<uint64_t> positions64_;
  uint32_t section_count_ = 0;
  uint8_t flags_ = 0;
  size_t length_ = 0;
};

}  // namespace thinwire

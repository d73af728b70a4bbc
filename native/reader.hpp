// The reader of a frame: validates all bytes before any value is written.
#pragma once
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "frame.hpp"
#include "values.hpp"

namespace thinwire {

// An allocator that does not initialise new elements: positions are written right after a resize.
template <class T>
struct Unfilled : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Unfilled<U>;
  };
  template <class U>
  void construct(U* place) {
    ::new (static_cast<void*>(place)) U;
  }
  template <class U, class... Args>
  void construct(U* place, Args&&... args) {
    ::new (static_cast<void*>(place)) U(std::forward<Args>(args)...);
  }
};
template <class T>
using Positions = std::vector<T, Unfilled<T>>;

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
  class Walk;     // see sum.cpp
  class Reading;  // see reading.hpp

  // numels: the sizes of the tensors that the receiver expects, by id. Throws FrameFault.
  // trailing: bytes after the frame are allowed (padding of collectives of a fixed size).
  Reader(const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels, bool trailing) {
    read(frame, size, numels, trailing);
  }
  // An empty reader. `read` may be called many times and reuses memory. After a FrameFault the contents are undefined.
  Reader() = default;
  void read(const uint8_t* frame, size_t size, const std::vector<uint64_t>& numels, bool trailing);

  const std::vector<Section>& sections() const { return sections_; }
  uint8_t flags() const { return flags_; }
  size_t length() const { return length_; }

  bool owns(const Section& s) const { return &s >= sections_.data() && &s < sections_.data() + sections_.size(); }
  // Adds weight * value to out[position] for one section.
  void add(const Section&, float* out, float weight) const;
  void entries(const Section&, uint64_t* positions, float* values) const;

 private:
  struct Block {
    const uint8_t* values;
    uint64_t begin;  // kRun: the first position; else the index into positions32_ or positions64_
    uint16_t count;
    uint16_t bytes;  // of the values
    bool run;
  };
  template <class F>
  void for_blocks(const Section&, F&&) const;

  std::vector<Section> sections_;
  std::vector<Block> blocks_;
  // Positions take four bytes where that is enough, which halves memory and traffic.
  Positions<uint32_t> positions32_;
  Positions<uint64_t> positions64_;
  uint8_t flags_ = 0;
  size_t length_ = 0;
};

}  // namespace thinwire

// The writer of a frame: appends sections to a caller's buffer. Entries that do not fit stay in the residual.
#pragma once
#include <optional>
#include <vector>

#include "frame.hpp"
#include "partition.hpp"
#include "scan.hpp"
#include "values.hpp"

namespace thinwire {

struct Cutoff {
  float threshold;  // entries above it are sent
  uint64_t ties;    // and the first `ties` of those equal to it
};

// The elements [start, start + count) of a vector.
struct Window {
  uint64_t start, count;
};

struct Target {
  float* kept;  // receives what is not sent; null: that is lost
  float* mask;  // set to zero where an entry was sent (DGC's momentum); may be null
};

// A vector to select from and to write as a section.
struct SectionInput {
  uint32_t id;
  Vector vector;
  Target target;
  Format format;
  Rounding rounding;
};

// Entries of a section that were selected elsewhere: ascending positions below n.
struct EntriesInput {
  uint32_t id;
  const uint64_t* positions;
  const float* values;
  uint64_t count;
  size_t n;
  float* sent;  // receives the values as the receiver reads them
  Format format;
  Rounding rounding;
};

struct Written {
  uint64_t sent = 0;      // entries in the frame
  uint64_t selected = 0;  // entries that passed the cutoff
  uint64_t ties = 0;      // allowed ones that are left
  double magnitudes = 0;  // sum of |x| over the selected entries
};

class Writer {
 public:
  Writer(uint8_t* buffer, size_t capacity);

  // reserve: bytes to keep free for later sections.
  Written add_selected(const SectionInput&, Cutoff, size_t reserve);
  // One entry of each of `count` strata.
  Written add_strata(const SectionInput&, uint64_t count, uint64_t seed, size_t reserve);
  // All entries of a window. A window without entries, or without room for one, has no section.
  Written add_window(const SectionInput&, Window, size_t reserve);
  // As add_selected, into one frame per owner, each with its owner's share of the vector.
  static Written add_parts(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves, const Partition&,
                           const SectionInput&, Cutoff);
  // As add_window, into one frame per owner: the owner's elements of a window are a window of its share.
  static Written add_window_parts(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves,
                                  const Partition&, const SectionInput&, Window);
  // Returns how many entries found room. With a seed the positions are those of the seed's strata, and only the seed is
  // written.
  uint64_t add_entries(const EntriesInput&, std::optional<uint64_t> seed, size_t reserve);
  // Writes entries at consecutive positions as a window; returns how many found room.
  uint64_t add_window_entries(const EntriesInput&, size_t reserve);
  // Returns the frame's length. pad: fill the rest of the buffer with zeros.
  size_t finish(uint8_t flags, bool pad = false);

 private:
  friend class ShardWriter;
  // origin: the seed of strata or the start of a window.
  bool open(uint32_t id, Format, Indexing, uint64_t n, uint64_t origin, size_t reserve);
  bool open_window(uint32_t id, Format, uint64_t n, Window, size_t reserve);
  void close(uint64_t count);
  // Writes one block of n entries, or of as many as fit; returns how many. positions: null if the section's header
  // implies them.
  size_t block(const uint64_t* positions, const float* values, size_t n, float* sent);
  uint64_t blocks_of(const EntriesInput&, uint64_t count, bool with_positions);
  bool strata_fit(uint64_t count) const;
  template <class Prepare, class ToWhole>
  void add_window_blocks(const SectionInput&, uint64_t n, Window, size_t reserve, Prepare&&, ToWhole&&, Written&);
  class Stream;

  uint8_t* buffer_;
  size_t capacity_;
  size_t limit_ = 0;  // capacity minus the reserve of the current section
  size_t used_ = kHeaderBytes;
  uint32_t sections_ = 0;
  // The current section.
  Format format_{};
  Rounding rounding_{};
  size_t count_at_ = 0;
  unsigned count_width_ = 0;
  uint64_t previous_ = 0;
};

}  // namespace thinwire

// Builds one frame in a caller's buffer: sections are appended, what does not fit stays in the memory.
#pragma once
#include <vector>

#include "deal.hpp"
#include "frame.hpp"
#include "scan.hpp"
#include "values.hpp"

namespace thinwire {

struct Cut {
  float threshold;  // entries above it travel
  uint64_t ties;    // and this many of those equal to it, the first ones
};

struct Target {
  float* held;  // where the memory keeps what is not sent; null: dropped
  float* mask;  // a second memory that is cleared where an entry was sent (DGC's momentum); may be null
};

struct Written {
  uint64_t sent = 0;      // entries in the frame
  uint64_t selected = 0;  // entries that passed the selection
  uint64_t ties = 0;      // of those allowed, not used
  double magnitudes = 0;  // sum of |x| of the selected ones
};

class Writer {
 public:
  Writer(uint8_t* buffer, size_t capacity);

  // reserve: bytes to leave free for sections still to come.
  Written add_selected(uint32_t id, const Source&, size_t n, const Target&, Cut, Format, Rounding, size_t reserve);
  Written add_strata(uint32_t id, const Source&, size_t n, const Target&, uint64_t count, uint64_t seed, Format,
                     Rounding, size_t reserve);
  // The same into several frames, each with its owner's share of the vector; reserves are the owners', too.
  static Written add_dealt(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves, const Deal&,
                           uint32_t id, const Source&, size_t n, const Target&, Cut, Format, Rounding);
  // Entries chosen elsewhere (a GPU's twin, an exchange): ascending positions below n. With `strata` the positions
  // are those of the seed, and only the seed is written.
  Written add_entries(uint32_t id, const uint64_t* positions, const float* values, uint64_t count, size_t n,
                      float* sent, bool strata, uint64_t seed, Format, Rounding, size_t reserve);
  size_t finish(uint8_t flags, bool pad = false);  // returns the frame's length; pad: zeros follow, to the end

 private:
  friend class ShardWriter;
  bool open(uint32_t id, Format, Indexing, uint64_t n, uint64_t seed, size_t reserve);
  void close(uint64_t count);
  // Writes one block of n entries, or of as many as fit; returns how many were written.
  size_t block(const uint64_t* positions, const float* values, size_t n, bool with_positions, float* sent);
  bool strata_fit(uint64_t count) const;
  class Stream;

  uint8_t* buffer_;
  size_t capacity_;
  size_t limit_ = 0;  // capacity less the present section's reserve
  size_t used_ = kHeaderBytes;
  uint32_t sections_ = 0;
  // The section being written.
  Format format_{};
  Rounding rounding_{};
  size_t count_at_ = 0;
  unsigned count_width_ = 0;
  uint64_t previous_ = 0;
};

}  // namespace thinwire

// Access to the entries of a frame that was read.
#include "reader.hpp"

#include <algorithm>

namespace thinwire {

// Calls visit(position_of, values, count, ahead) for each block. position_of(i) is the position of the block's i-th
// entry; it may be called for i < ahead, which includes entries of later blocks.
template <class F>
void Reader::for_blocks(const Section& s, F&& visit) const {
  float values[kBlock];
  for (size_t at = s.first_block; at < s.first_block + s.blocks; ++at) {
    const Block& b = blocks_[at];
    read_block(s.format, b.values, b.bytes, b.count, values);
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
  constexpr size_t kAhead = 96;  // entries to prefetch, which hides the memory latency of the scattered additions
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

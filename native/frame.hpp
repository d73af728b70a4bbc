// The layout of a frame, shared by writer and reader (docs/wire-format.md specifies it).
#pragma once
#include <stdexcept>
#include <string>

#include "common.hpp"

namespace thinwire {

constexpr uint8_t kMagic[4] = {'T', 'W', 'F', 'R'};
constexpr uint8_t kVersion = 1;
constexpr size_t kHeaderBytes = 24;
constexpr uint8_t kNonFinite = 1;  // flag: the sender's input was not finite, the frame is empty

// Offsets in the header.
constexpr size_t kAtVersion = 4, kAtFlags = 5, kAtReserved = 6, kAtSections = 8, kAtCrc = 12, kAtLength = 16;

enum class Indexing : uint8_t { gaps = 0, strata = 1, window = 2 };
constexpr uint8_t kIndexings = 3;

// The bytes of a count up to numel. A count is written after its entries, so its width must not depend on its value.
inline unsigned count_width(uint64_t numel) {
  unsigned width = 1;
  while (width < 8 && numel >> (8 * width)) ++width;
  return width;
}

inline size_t varint_bytes(uint64_t x) { return x < 128 ? 1 : (size_t(std::bit_width(x)) + 6) / 7; }

// The size of what follows a section's count: the seed of strata, or the start of a window.
inline unsigned origin_width(Indexing indexing, uint64_t numel) {
  return indexing == Indexing::strata ? 8 : indexing == Indexing::window ? count_width(numel) : 0;
}

// The size of id, kind, numel, count, and the seed of strata or the start of a window.
inline size_t section_header_bytes(uint64_t id, uint64_t numel, Indexing indexing) {
  return varint_bytes(id) + 1 + varint_bytes(numel) + count_width(numel) + origin_width(indexing, numel);
}

struct FrameFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The checksum of all bytes of a frame but the field itself.
uint32_t frame_crc(const uint8_t* frame, size_t length);

static_assert(std::endian::native == std::endian::little,
              "frames are little-endian: this code needs a little-endian machine");

}  // namespace thinwire

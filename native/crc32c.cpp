// CRC-32C with the processor's instruction where it exists, otherwise with tables, eight bytes at a time.
#include "crc32c.hpp"

#include "frame.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace thinwire {
namespace {

struct Tables {
  uint32_t of[8][256];
  constexpr Tables() : of{} {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
      of[0][byte] = crc;
    }
    for (int k = 1; k < 8; ++k)
      for (uint32_t byte = 0; byte < 256; ++byte) of[k][byte] = of[k - 1][byte] >> 8 ^ of[0][of[k - 1][byte] & 255];
  }
};
constexpr Tables tables;

uint32_t by_tables(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= tables.of[7 - k][word >> (8 * k) & 255];
  }
  for (; n; ++p, --n) crc = crc >> 8 ^ tables.of[0][(crc ^ *p) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const uint8_t* p, size_t n) {
  uint64_t wide = crc;
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = uint32_t(wide);
  for (; n; ++p, --n) crc = _mm_crc32_u8(crc, *p);
  return crc;
}
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size) {
  crc = ~crc;
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2");
  if (has) return ~by_instruction(crc, data, size);
#endif
  return ~by_tables(crc, data, size);
}

uint32_t frame_crc(const uint8_t* frame, size_t length) {
  return crc32c(crc32c(0, frame, kAtCrc), frame + kAtLength, length - kAtLength);
}

}  // namespace thinwire

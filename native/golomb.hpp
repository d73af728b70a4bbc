// The codes of remainders, which the writer and the reader of gaps share.
#pragma once
#include "common.hpp"

namespace thinwire {

struct Code {
  uint8_t bits;
  uint8_t length;
};

// Truncated binary codes for remainders below 1 to 7. The first bits of a code determine its length.
struct Truncated {
  Code encode[8][8];
  Code decode[8][8];  // the remainder and its length, by the next three bits of the stream
  constexpr Truncated() : encode{}, decode{} {
    for (unsigned m = 1; m < 8; ++m) {
      unsigned width = 0;
      while ((1u << width) < m) ++width;
      const unsigned cutoff = (1u << width) - m;
      for (unsigned r = 0; r < m; ++r) {
        Code c{uint8_t(r), uint8_t(width ? width - 1 : 0)};
        if (width && r >= cutoff) {
          const unsigned t = r + cutoff;
          c = {uint8_t(t >> 1 | (t & 1) << (width - 1)), uint8_t(width)};
        }
        encode[m][r] = c;
        for (unsigned high = 0; high < (8u >> c.length); ++high)
          decode[m][c.bits | high << c.length] = {uint8_t(r), c.length};
      }
    }
  }
};
inline constexpr Truncated truncated;

}  // namespace thinwire

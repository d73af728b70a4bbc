// Writes gaps as Golomb codes. Bits fill each byte from the lowest: q zeros and a one (the quotient), the truncated
// binary code of the high part of the remainder, then the `shift` low bits.
#include "positions.hpp"

#include "golomb.hpp"

namespace thinwire {
namespace {

class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : at_(out) {}
  void put(uint64_t bits, unsigned length) {  // length <= 56
    word_ |= bits << used_;
    used_ += length;
    std::memcpy(at_, &word_, 8);
    at_ += used_ >> 3;
    word_ >>= used_ & 56u;
    used_ &= 7;
  }
  uint8_t* finish() { return at_ + (used_ != 0); }

 private:
  uint8_t* at_;
  uint64_t word_ = 0;
  unsigned used_ = 0;
};

// The parameter whose divisor is the largest up to about ln 2 times the mean gap (Golomb's optimum for a
// geometric distribution). The sum of all quotients is then below 2 n, which bounds the block's size.
uint8_t choose_parameter(uint64_t gaps, size_t n) {
  const uint64_t mean = gaps / n, rest = gaps % n;
  uint64_t target = mean / 65536 * 45426 + (mean % 65536 * 45426 + rest * 45426 / n + 57671) / 65536;
  target += target / 16;
  if (target < 4) return target ? uint8_t(target - 1) : 0;
  const unsigned shift = unsigned(std::bit_width(target)) - 3;
  return uint8_t(3 + 4 * shift + ((target >> shift) & 3));
}

}  // namespace

size_t write_positions(const uint64_t* positions, size_t n, uint64_t previous, uint8_t* out) {
  const uint64_t gaps = positions[n - 1] - previous - n;
  if (gaps == 0) {
    out[0] = kRun;
    return 1;
  }
  out[0] = choose_parameter(gaps, n);
  const Divisor d = divisor_of(out[0]);
  const uint64_t low = (uint64_t(1) << d.shift) - 1;
  const uint64_t reciprocal = (uint64_t(1) << 34) / d.factor + 1;  // gives exact quotients below 2^29
  BitWriter bits(out + 1);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t gap = positions[i] - previous - 1;
    previous = positions[i];
    const uint64_t high = gap >> d.shift;
    uint64_t quotient = high < (uint64_t(1) << 29) ? high * reciprocal >> 34 : high / d.factor;
    const Code code = truncated.encode[d.factor][high - quotient * d.factor];
    for (; quotient >= 32; quotient -= 32) bits.put(0, 32);
    if (d.shift <= 16) {  // at most 33 + 3 + 16 bits fit one call
      const uint64_t tail = uint64_t(1) | uint64_t(code.bits) << 1 | (gap & low) << (1 + code.length);
      bits.put(tail << quotient, unsigned(quotient) + 1 + code.length + d.shift);
    } else {
      bits.put((uint64_t(1) | uint64_t(code.bits) << 1) << quotient, unsigned(quotient) + 1 + code.length);
      const unsigned first = d.shift < 32 ? d.shift : 32;
      bits.put(gap & low & 0xffffffffu, first);
      if (d.shift > 32) bits.put((gap & low) >> 32, d.shift - 32);
    }
  }
  return size_t(bits.finish() - out);
}

}  // namespace thinwire

// Golomb coding of gaps. Bits fill each byte from the lowest: q zeros and a one (the quotient), the truncated
// binary code of the remainder's high part, then `shift` low bits as they are.
#include "positions.hpp"

namespace thinwire {
namespace {

struct Code {
  uint8_t bits;
  uint8_t length;
};

// Truncated binary codes for remainders below 1 to 7, so written that the first bits tell the length.
struct Truncated {
  Code encode[8][8];
  Code decode[8][8];  // by the next three bits of the stream: the remainder and its length
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
constexpr Truncated truncated;

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
// geometric law). The sum of all quotients is then below 2 n, which bounds the block's size.
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
  const uint64_t reciprocal = (uint64_t(1) << 34) / d.factor + 1;  // exact quotients below 2^29
  BitWriter bits(out + 1);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t gap = positions[i] - previous - 1;
    previous = positions[i];
    const uint64_t high = gap >> d.shift;
    uint64_t quotient = high < (uint64_t(1) << 29) ? high * reciprocal >> 34 : high / d.factor;
    const Code code = truncated.encode[d.factor][high - quotient * d.factor];
    for (; quotient >= 32; quotient -= 32) bits.put(0, 32);
    if (d.shift <= 16) {  // at most 33 + 3 + 16 bits: one call
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

namespace {

class BitReader {
 public:
  BitReader(const uint8_t* in, const uint8_t* end) : at_(in), end_(end) { refill(); }
  void refill() {
    if (end_ - at_ >= 8) {
      uint64_t word;
      std::memcpy(&word, at_, 8);
      word_ |= word << held_;
      at_ += (63 - held_) >> 3;
      held_ |= 56;
    } else {
      while (held_ < 56 && at_ < end_) {
        word_ |= uint64_t(*at_++) << held_;
        held_ += 8;
      }
    }
  }
  unsigned held() const { return held_; }
  uint64_t peek() const { return word_; }
  void drop(unsigned n) {
    word_ >>= n;
    held_ -= n;
  }
  void drop(unsigned zeros, unsigned fixed, unsigned longer) {
    word_ = word_ >> zeros >> fixed >> longer;
    held_ -= zeros + fixed + longer;
  }
  // The first byte that no bit has been taken from.
  const uint8_t* finish() const { return at_ - held_ / 8; }
  bool padding_is_zero() const { return (word_ & ((uint64_t(1) << (held_ % 8)) - 1)) == 0; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  uint64_t word_ = 0;
  unsigned held_ = 0;
};

constexpr const char* kTruncatedGaps = "the frame ends within the positions of a block";
constexpr const char* kOutside = "a position lies outside of its tensor";

// One gap the careful way: any quotient, any shift, any distance to the end.
bool read_gap(BitReader& bits, Divisor d, uint64_t most, uint64_t& gap, const char** error) {
  uint64_t quotient = 0;
  unsigned zeros;
  for (;;) {
    bits.refill();
    if (bits.held() == 0) return *error = kTruncatedGaps, false;
    zeros = bits.peek() ? unsigned(std::countr_zero(bits.peek())) : 64;
    if (zeros < bits.held()) break;
    quotient += bits.held();
    bits.drop(bits.held());
    if (quotient > most) return *error = kOutside, false;
  }
  quotient += zeros;
  bits.drop(zeros);
  bits.drop(1);
  bits.refill();
  const Code code = truncated.decode[d.factor][bits.peek() & 7];
  if (code.length > bits.held()) return *error = kTruncatedGaps, false;
  bits.drop(code.length);
  if (quotient > most) return *error = kOutside, false;
  const uint64_t high = quotient * d.factor + code.bits;
  if (high > most >> d.shift) return *error = kOutside, false;
  uint64_t low = 0;
  for (unsigned done = 0; done < d.shift;) {
    bits.refill();
    const unsigned take = d.shift - done < 32 ? d.shift - done : 32;
    if (bits.held() < take) return *error = kTruncatedGaps, false;
    low |= (bits.peek() & ((uint64_t(1) << take) - 1)) << done;
    bits.drop(take);
    done += take;
  }
  gap = high << d.shift | low;
  return true;
}

// How long the code of a remainder is: the shortest length, or one bit more from a cutoff of its first bits.
struct Lengths {
  const Code* decode;
  unsigned shortest = 0;
  uint64_t mask = 0, cutoff = 1;  // a factor of one: never longer
  explicit Lengths(unsigned factor) : decode(truncated.decode[factor]) {
    unsigned width = 0;
    while ((1u << width) < factor) ++width;
    if (!width) return;
    shortest = width - 1;
    mask = (uint64_t(1) << shortest) - 1;
    cutoff = (uint64_t(1) << width) - factor;
  }
};

// Gaps that one refill serves: as many as fit into 56 bits if none has more than `zeros` zeros, and more are rare.
struct Batch {
  unsigned gaps, zeros;
  explicit Batch(Divisor d) : gaps(56 / (d.shift + 13)) {
    if (gaps > 3) gaps = 3;
    zeros = gaps ? 56 / gaps - d.shift - 4 : 0;
  }
};

}  // namespace

template <class Position>
size_t read_positions(uint8_t parameter, const uint8_t* in, const uint8_t* end, size_t n, uint64_t previous,
                      uint64_t numel, Position* out, const char** error) {
  const Divisor d = divisor_of(parameter);
  const Lengths codes(d.factor);
  const unsigned fixed = 1 + codes.shortest + d.shift;
  const Batch batch(d);
  const uint64_t low = (uint64_t(1) << d.shift) - 1;
  uint64_t next = previous + 1;  // the lowest place that the next entry can take
  BitReader bits(in, end);
  for (size_t i = 0; i < n;) {
    bits.refill();
    const size_t stop = bits.held() < 56 ? i : n - i < batch.gaps ? n : i + batch.gaps;
    bool careful = stop == i;
    while (i < stop) {
      const uint64_t word = bits.peek();
      const unsigned zeros = unsigned(std::countr_zero(word | uint64_t(1) << 63));
      if ((careful = zeros > batch.zeros)) break;
      const uint64_t rest = word >> zeros >> 1;
      // The next gap waits for this length: compared, not looked up, for a table's answer would take longer.
      const unsigned longer = (rest & codes.mask) >= codes.cutoff;
      const Code code = codes.decode[rest & 7];
      bits.drop(zeros, fixed, longer);
      // These gaps are below 2^50: the sum of a block's cannot wrap, so that one check after the last is enough.
      next += (uint64_t(zeros) * d.factor + code.bits) << d.shift | (rest >> code.length & low);
      out[i++] = Position(next++);
    }
    if (!careful) continue;
    uint64_t gap;
    if (!read_gap(bits, d, next < numel ? numel - next : 0, gap, error)) return 0;
    if (next >= numel || gap >= numel - next) return *error = kOutside, 0;
    next += gap;
    out[i++] = Position(next++);
  }
  if (next > numel) return *error = kOutside, 0;
  if (!bits.padding_is_zero()) return *error = "the padding after a block's positions is not zero", 0;
  return size_t(bits.finish() - in);
}

template size_t read_positions<uint32_t>(uint8_t, const uint8_t*, const uint8_t*, size_t, uint64_t, uint64_t,
                                         uint32_t*, const char**);
template size_t read_positions<uint64_t>(uint8_t, const uint8_t*, const uint8_t*, size_t, uint64_t, uint64_t,
                                         uint64_t*, const char**);

}  // namespace thinwire

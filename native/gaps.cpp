// Reads gaps. Every gap must be decoded before it is known where the next one begins. Decoding two blocks of different
// frames in turns hides the latency of this dependency.
#include <algorithm>

#include "golomb.hpp"
#include "positions.hpp"

namespace thinwire {
namespace {

class BitReader {
 public:
  BitReader(const uint8_t* in, const uint8_t* end) : at_(in), end_(end) { refill(); }
  bool far_from_end() const { return end_ - at_ >= 8; }
  void refill_far_from_end() {
    uint64_t word;
    std::memcpy(&word, at_, 8);
    word_ |= word << count_;
    at_ += (63 - count_) >> 3;
    count_ |= 56;
  }
  void refill() {
    if (far_from_end()) {
      refill_far_from_end();
    } else {
      while (count_ < 56 && at_ < end_) {
        word_ |= uint64_t(*at_++) << count_;
        count_ += 8;
      }
    }
  }
  unsigned count() const { return count_; }
  uint64_t peek() const { return word_; }
  void drop(unsigned n) {
    word_ >>= n;
    count_ -= n;
  }
  // Replaces the bits by those that are left after n were taken.
  void keep(uint64_t word, unsigned n) {
    word_ = word;
    count_ -= n;
  }
  // The first byte that no bit was taken from.
  const uint8_t* finish() const { return at_ - count_ / 8; }
  bool padding_is_zero() const { return (word_ & ((uint64_t(1) << (count_ % 8)) - 1)) == 0; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  uint64_t word_ = 0;
  unsigned count_ = 0;
};

constexpr const char* kTruncatedGaps = "the frame ends within the positions of a block";
constexpr const char* kOutside = "a position lies outside of its tensor";

// Reads one gap with all checks: any quotient, any shift, any distance to the end.
bool read_gap(BitReader& bits, Divisor d, uint64_t most, uint64_t& gap, const char** error) {
  uint64_t quotient = 0;
  unsigned zeros;
  for (;;) {
    bits.refill();
    if (bits.count() == 0) return *error = kTruncatedGaps, false;
    zeros = bits.peek() ? unsigned(std::countr_zero(bits.peek())) : 64;
    if (zeros < bits.count()) break;
    quotient += bits.count();
    bits.drop(bits.count());
    if (quotient > most) return *error = kOutside, false;
  }
  quotient += zeros;
  bits.drop(zeros);
  bits.drop(1);
  bits.refill();
  const Code code = truncated.decode[d.factor][bits.peek() & 7];
  if (code.length > bits.count()) return *error = kTruncatedGaps, false;
  bits.drop(code.length);
  if (quotient > most) return *error = kOutside, false;
  const uint64_t high = quotient * d.factor + code.bits;
  if (high > most >> d.shift) return *error = kOutside, false;
  uint64_t low = 0;
  for (unsigned done = 0; done < d.shift;) {
    bits.refill();
    const unsigned take = d.shift - done < 32 ? d.shift - done : 32;
    if (bits.count() < take) return *error = kTruncatedGaps, false;
    low |= (bits.peek() & ((uint64_t(1) << take) - 1)) << done;
    bits.drop(take);
    done += take;
  }
  gap = high << d.shift | low;
  return true;
}

// Lookup table by the next bits of the stream: quotient * factor + remainder in the high byte, and in the low byte the
// number of bits that these take, or kLong if they do not fit the table.
constexpr unsigned kPeek = 11, kLong = 64;
struct Prefixes {
  uint16_t of[8][1u << kPeek];
  Prefixes() : of{} {
    for (unsigned factor = 1; factor < 8; ++factor)
      for (unsigned next = 0; next < (1u << kPeek); ++next) {
        const unsigned zeros = unsigned(std::countr_zero(next | 1u << kPeek));
        const Code code = truncated.decode[factor][next >> zeros >> 1 & 7];
        const unsigned length = zeros + 1 + code.length;
        of[factor][next] = uint16_t(length > kPeek ? kLong : (zeros * factor + code.bits) << 8 | length);
      }
  }
};
const Prefixes prefixes;

// The decoder of one block.
template <class Position>
class Lane {
 public:
  // A struct of its own, passed by value out of the loop, so that it stays in registers.
  struct State {
    BitReader bits;
    uint64_t next;  // the lowest position that the next entry can have
    Position* out;
  };

  explicit Lane(Gaps<Position>& gaps)
      : gaps_(gaps),
        divisor_(divisor_of(gaps.parameter)),
        prefixes_(prefixes.of[divisor_.factor]),
        low_((uint64_t(1) << divisor_.shift) - 1),
        batch_(std::min<size_t>(56 / (kPeek + divisor_.shift), 3)),
        stop_(gaps.out + gaps.n),
        last_(batch_ && batch_ <= gaps.n ? stop_ - batch_ + 1 : gaps.out) {}
  State begin() const { return {BitReader(gaps_.in, gaps_.end), gaps_.previous + 1, gaps_.out}; }

  bool ready(const State& s) const { return s.out < last_ && s.bits.far_from_end(); }
  // Reads as many gaps as one refill holds, or only the first if one of the codes is long, which is rare.
  [[gnu::always_inline]] void batch(State& s) {
    s.bits.refill_far_from_end();
    uint64_t word = s.bits.peek(), next = s.next;
    unsigned lengths = 0;
    const auto one = [&](size_t i) {
      const unsigned prefix = prefixes_[word & ((1u << kPeek) - 1)];
      const uint64_t rest = word >> (prefix & 63);
      lengths += prefix;
      word = rest >> divisor_.shift;
      next += uint64_t(prefix >> 8) << divisor_.shift | (rest & low_);
      s.out[i] = Position(next++);
    };
    one(0);
    if (batch_ > 1) [[likely]]
      one(1);
    if (batch_ > 2) [[likely]]
      one(2);
    if (lengths & (kLong | 2 * kLong)) [[unlikely]]
      return single(s);  // one, two or three codes are long
    s.bits.keep(word, (lengths & 63) + unsigned(batch_) * divisor_.shift);
    s.next = next;
    s.out += batch_;
  }
  // Reads the remaining gaps and makes the final checks.
  void finish(State s) {
    while (ready(s)) batch(s);
    while (s.out < stop_) {
      if (batch_ && s.bits.far_from_end()) {
        s.bits.refill_far_from_end();
        single(s);
      } else {
        s = careful(s);
      }
    }
    if (gaps_.error) return;
    if (s.next > gaps_.numel)
      gaps_.error = kOutside;
    else if (!s.bits.padding_is_zero())
      gaps_.error = "the padding after a block's positions is not zero";
    else
      gaps_.read = size_t(s.bits.finish() - gaps_.in);
  }

 private:
  // Reads a gap whose bits are all among the 56 available; others go to `careful`. Batches and this function read gaps
  // below 2^51 only: their sum over a block cannot overflow, so one check after the last gap is enough.
  [[gnu::always_inline]] void single(State& s) {
    const uint64_t word = s.bits.peek();
    const unsigned zeros = unsigned(std::countr_zero(word | uint64_t(1) << 63));
    if (zeros + 4 + divisor_.shift > 56) {
      s = careful(s);
      return;
    }
    const uint64_t rest = word >> zeros >> 1;
    const Code code = truncated.decode[divisor_.factor][rest & 7];
    s.bits.drop(zeros + 1 + code.length + divisor_.shift);
    s.next += (uint64_t(zeros) * divisor_.factor + code.bits) << divisor_.shift | (rest >> code.length & low_);
    *s.out++ = Position(s.next++);
  }

  // Reads any gap at any distance to the end. After an error the lane is at its end.
  [[gnu::noinline]] State careful(State s) {
    const uint64_t room = s.next < gaps_.numel ? gaps_.numel - s.next : 0;
    uint64_t gap = 0;
    // A position outside of the tensor is the error to report, whatever follows: batches must not change the message.
    if (s.next > gaps_.numel || (read_gap(s.bits, divisor_, room, gap, &gaps_.error) && gap >= room))
      gaps_.error = kOutside;
    if (gaps_.error) {
      s.out = stop_;
      return s;
    }
    s.next += gap;
    *s.out++ = Position(s.next++);
    return s;
  }

  Gaps<Position>& gaps_;
  const Divisor divisor_;
  const uint16_t* const prefixes_;
  const uint64_t low_;
  const size_t batch_;  // gaps that one refill holds if no code is long; 0 if there are too many low bits
  Position* const stop_;
  Position* const last_;  // a batch must begin before it
};

}  // namespace

template <class Position>
void read_positions(Gaps<Position>& gaps) {
  Lane<Position> lane(gaps);
  lane.finish(lane.begin());
}

void read_positions(Gaps<uint32_t>& one, Gaps<uint32_t>& other) {
  Lane<uint32_t> a(one), b(other);
  auto s = a.begin(), t = b.begin();
  while (a.ready(s) && b.ready(t)) {
    a.batch(s);
    b.batch(t);
  }
  a.finish(s);
  b.finish(t);
}

template void read_positions(Gaps<uint32_t>&);
template void read_positions(Gaps<uint64_t>&);

}  // namespace thinwire

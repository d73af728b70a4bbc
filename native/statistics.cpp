// Statistics of vectors. Sums run in eight fixed lanes, so that every build gives the same bits.
#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "positions.hpp"

namespace thinwire {
namespace {

constexpr size_t kCached = 16;  // floats per cache line

template <Dtype D, bool Residual>
inline float element(const Source& s, size_t i) {
  const float x = Load<D>::at(static_cast<const typename Load<D>::type*>(s.gradient), i);
  if constexpr (!Residual) return x;
  return saturate(s.decay == 1.0f ? s.residual[i] + x : s.residual[i] * s.decay + x);
}

// Calls visit(begin, end) for the whole vector, or for one line at a random position of each stratum. Lines are far
// apart; prefetching them in batches hides the memory latency.
template <class Prefetch, class Visit>
void for_sample(size_t n, uint64_t wanted, uint64_t seed, Prefetch&& prefetch, Visit&& visit) {
  const uint64_t lines = (wanted + kLine - 1) / kLine, all = n / kLine;
  if (lines >= all) return visit(size_t(0), n);
  constexpr uint64_t kBatch = 32;
  size_t begins[2][kBatch];
  const auto fetch = [&](uint64_t first, size_t* into) {
    const uint64_t count = first < lines ? std::min(kBatch, lines - first) : 0;
    for (uint64_t j = 0; j < count; ++j) {
      into[j] = size_t(stratum_position(seed, first + j, lines, all)) * kLine;
      prefetch(into[j]);
    }
    return count;
  };
  uint64_t count = fetch(0, begins[0]);
  for (uint64_t first = 0, turn = 0; count; first += kBatch, turn ^= 1) {
    const uint64_t next = fetch(first + kBatch, begins[turn ^ 1]);
    for (uint64_t j = 0; j < count; ++j) visit(begins[turn][j], begins[turn][j] + kLine);
    count = next;
  }
}

template <Dtype D, bool Residual>
inline void fetch_line(const Source& s, size_t i) {
  for (size_t j = i; j < i + kLine; j += kCached) {
    __builtin_prefetch(static_cast<const typename Load<D>::type*>(s.gradient) + j);
    if constexpr (Residual) __builtin_prefetch(s.residual + j);
  }
}

template <class F>
auto with_source(const Source& s, F&& f) {
  return with_dtype(s.dtype, [&]<Dtype D>() {
    return s.residual ? f.template operator()<D, true>() : f.template operator()<D, false>();
  });
}

// Calls visit.operator()<D, Residual>(source, begin, n) for about `wanted` elements, in proportion to the vectors'
// sizes, line by line; the last line may be shorter.
template <class Visit>
void visit_sample(const std::vector<Vector>& vectors, uint64_t wanted, uint64_t seed, Visit&& visit) {
  uint64_t all = 0;
  for (const Vector& v : vectors) all += v.n;
  for (size_t j = 0; j < vectors.size(); ++j) {
    const Vector& v = vectors[j];
    const auto share = uint64_t(double(wanted) * double(v.n) / double(all) + 1.0);
    with_source(v.source, [&]<Dtype D, bool Residual>() {
      const auto prefetch = [&](size_t i) { fetch_line<D, Residual>(v.source, i); };
      for_sample(v.n, share, mix(seed + j), prefetch, [&](size_t begin, size_t end) {
        for (; begin < end; begin += kLine)
          visit.template operator()<D, Residual>(v.source, begin, std::min(kLine, end - begin));
      });
    });
  }
}

struct Largest {
  std::vector<uint32_t> bits;  // at or above the floor
  uint64_t taken = 0;          // the sample's size
};

// Returns the elements of a sample that reach a floor. The whole sample is not stored, because it would not fit the
// cache.
Largest above_floor(const std::vector<Vector>& vectors, uint64_t wanted, uint64_t seed, uint32_t floor) {
  Largest found;
  size_t kept = 0;
  [[maybe_unused]] const bool wide = avx2_in_use();
  visit_sample(vectors, wanted, seed, [&]<Dtype D, bool Residual>(const Source& s, size_t begin, size_t n) {
    found.taken += n;
    if (found.bits.size() < kept + kLine + kSlack) found.bits.resize(2 * kept + 4096);
#if defined(__x86_64__)
    if (wide && n == kLine) {
      kept += line_above_avx2(s, begin, floor, found.bits.data() + kept);
      return;
    }
#endif
    uint32_t bits[kLine], most = 0;
    for (size_t i = 0; i < n; ++i) bits[i] = magnitude_bits(element<D, Residual>(s, begin + i));
    for (size_t i = 0; i < n; ++i) most = std::max(most, bits[i]);
    if (most < floor) return;
    for (size_t i = 0; i < n; ++i) {  // branch-free: there is always room for one more element
      found.bits[kept] = bits[i];
      kept += bits[i] >= floor;
    }
  });
  found.bits.resize(kept);
  return found;
}

// Estimates, from a few lines of the sample, a floor that is safely below the wanted rank; 0 if there is none.
uint32_t low_floor(const std::vector<Vector>& vectors, uint64_t wanted, uint64_t seed, double density) {
  const uint64_t some = std::min<uint64_t>(wanted / 8, 4096);
  const double share = 1.5 * density + 20.0 / double(some);
  if (some < 512 || share > 0.5) return 0;
  std::vector<uint32_t> few = above_floor(vectors, some, seed, 0).bits;
  const auto place = few.begin() + std::ptrdiff_t(share * double(few.size()));
  std::nth_element(few.begin(), place, few.end(), std::greater<>());
  return *place;
}

}  // namespace

std::vector<uint32_t> sample_of(const std::vector<Vector>& vectors, uint64_t wanted, uint64_t seed) {
  return above_floor(vectors, wanted, seed, 0).bits;
}

std::vector<SampledThreshold> sampled_thresholds(const std::vector<Vector>& vectors,
                                                 const std::vector<double>& densities, uint64_t wanted, uint64_t seed) {
  std::vector<SampledThreshold> found;
  if (densities.empty()) return found;
  const double most = *std::max_element(densities.begin(), densities.end());
  Largest largest = above_floor(vectors, wanted, seed, low_floor(vectors, wanted, seed, most));
  if (largest.bits.size() <= uint64_t(most * double(largest.taken))) largest = above_floor(vectors, wanted, seed, 0);
  for (const double density : densities) {
    const auto rank = uint64_t(density * double(largest.taken));
    if (rank >= largest.taken) {
      found.push_back({0.0f, 1.0});
      continue;
    }
    const auto place = largest.bits.begin() + std::ptrdiff_t(rank);
    std::nth_element(largest.bits.begin(), place, largest.bits.end(), std::greater<>());
    const uint32_t value = *place;
    const auto greater = std::count_if(largest.bits.begin(), place, [&](uint32_t bits) { return bits > value; });
    found.push_back({std::bit_cast<float>(value), double(greater) / double(largest.taken)});
  }
  return found;
}

Moments moments(const Vector& v, uint64_t wanted, uint64_t seed) {
  Moments m;
  with_source(v.source, [&]<Dtype D, bool Residual>() {
    const auto prefetch = [&](size_t i) { fetch_line<D, Residual>(v.source, i); };
    for_sample(v.n, wanted, seed, prefetch, [&](size_t begin, size_t end) {
      // Eight lanes in registers; the remaining elements go to the first lanes.
      double sum[8] = {}, squares[8] = {}, magnitudes[8] = {};
      const auto take = [&](size_t i, size_t lane) {
        const double x = element<D, Residual>(v.source, i);
        sum[lane] += x;
        squares[lane] += x * x;
        magnitudes[lane] += std::fabs(x);
      };
      size_t i = begin;
      for (; i + 8 <= end; i += 8)
        for (size_t lane = 0; lane < 8; ++lane) take(i + lane, lane);
      for (; i < end; ++i) take(i, i & 7);
      for (int lane = 0; lane < 8; ++lane) {
        m.sum += sum[lane];
        m.squares += squares[lane];
        m.magnitudes += magnitudes[lane];
      }
      m.count += end - begin;
    });
  });
  return m;
}

namespace {

// Copies and partially sorts a few elements, which is cheaper than clearing the histograms.
OrderStatistic select_few(const Vector& v, uint64_t rank) {
  std::vector<uint32_t> bits(v.n);
  with_source(v.source, [&]<Dtype D, bool Residual>() {
    for (size_t i = 0; i < v.n; ++i) bits[i] = magnitude_bits(element<D, Residual>(v.source, i));
  });
  const auto place = bits.begin() + std::ptrdiff_t(rank);
  std::nth_element(bits.begin(), place, bits.end(), std::greater<>());
  const uint32_t value = *place;
  uint64_t greater = 0, equal = 0;
  for (const uint32_t b : bits) {
    greater += b > value;
    equal += b == value;
  }
  return {std::bit_cast<float>(value), greater, equal};
}

}  // namespace

OrderStatistic select(const std::vector<Vector>& vectors, uint64_t rank) {
  if (vectors.size() == 1 && vectors[0].n <= (size_t(1) << 14)) return select_few(vectors[0], rank);
  // Radix select with digits of 14, 9 and 8 bits from the top: each pass determines one digit of the answer.
  constexpr unsigned shifts[] = {17, 8, 0}, widths[] = {14, 9, 8};
  uint32_t prefix = 0;
  uint64_t greater = 0, equal = 0;
  for (int digit = 0; digit < 3; ++digit) {
    const unsigned shift = shifts[digit], width = widths[digit];
    std::vector<uint64_t> counts(size_t(1) << width);
    const uint32_t mask = (1u << width) - 1;
    for (const Vector& v : vectors)
      with_source(v.source, [&]<Dtype D, bool Residual>() {
        for (size_t i = 0; i < v.n; ++i) {
          const uint32_t bits = magnitude_bits(element<D, Residual>(v.source, i));
          if (bits >> shift >> width == prefix) ++counts[bits >> shift & mask];
        }
      });
    uint32_t bin = mask;
    while (greater + counts[bin] <= rank) greater += counts[bin--];
    prefix = prefix << width | bin;
    equal = counts[bin];
  }
  return {std::bit_cast<float>(prefix), greater, equal};
}

uint64_t collect_above(const Vector& v, float threshold, float* out, uint64_t capacity) {
  uint32_t offsets[kChunk + kSlack];
  float values[kChunk + kSlack];
  const Scan scan = scan_in_use();
  uint64_t count = 0;
  for (size_t begin = 0; begin < v.n; begin += kChunk) {
    const size_t kept = scan(v.source, begin, std::min(kChunk, v.n - begin), threshold, false, offsets, values);
    for (size_t i = 0; i < kept && count + i < capacity; ++i) out[count + i] = magnitude(values[i]);
    count += kept;
  }
  return count;
}

bool all_zero(const void* data, Dtype dtype, size_t n) {
  const auto* p = static_cast<const uint8_t*>(data);
  const size_t bytes = n * (dtype == Dtype::float32 ? 4 : 2);
  // Memory whose first byte is zero and that equals itself shifted by one byte is all zeros.
  return bytes == 0 || (p[0] == 0 && std::memcmp(p, p + 1, bytes - 1) == 0);
}

bool all_finite(const void* data, Dtype dtype, size_t n) {
#if defined(__x86_64__)
  if (avx2_in_use()) return all_finite_avx2(data, dtype, n);
#endif
  // An element is not finite when all bits of its exponent are set.
  int32_t bad = 0;
  if (dtype == Dtype::float32) {
    const auto* p = static_cast<const int32_t*>(data);
    for (size_t i = 0; i < n; ++i) bad |= -int32_t((p[i] & 0x7f800000) == 0x7f800000);
  } else {
    const int16_t exponent = dtype == Dtype::float16 ? 0x7c00 : 0x7f80;
    const auto* p = static_cast<const int16_t*>(data);
    for (size_t i = 0; i < n; ++i) bad |= -int32_t((p[i] & exponent) == exponent);
  }
  return bad == 0;
}

}  // namespace thinwire

// The pass in AVX2: eight elements at a time. A permutation, looked up by the mask of the comparison, compacts the
// selected elements.
#include "scan.hpp"
#include "statistics.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace thinwire {
namespace {

// lane[mask] lists the lanes whose bit is set, in ascending order: the permutation that compacts them.
struct Permutations {
  alignas(32) uint32_t lane[256][8];
  constexpr Permutations() : lane{} {
    for (int mask = 0; mask < 256; ++mask) {
      int kept = 0;
      for (uint32_t bit = 0; bit < 8; ++bit)
        if (mask >> bit & 1) lane[mask][kept++] = bit;
    }
  }
};
constexpr Permutations permutations;
constexpr int kFew = 3;  // up to this many selected entries of 32 are cheaper to take one by one
static_assert(kFew <= kSlack);

// Hardware prefetching stops at page boundaries. 32 elements of float32 are two cache lines.
template <class T>
inline void ahead(const T* p) {
  constexpr size_t kAhead = 512, kLine = 64 / sizeof(T);
  _mm_prefetch(reinterpret_cast<const char*>(p + kAhead), _MM_HINT_T0);
  if constexpr (sizeof(T) == 4) _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + kLine), _MM_HINT_T0);
}

template <Dtype D>
inline __m256 load8(const void* p, size_t i) {
  if constexpr (D == Dtype::float32) {
    return _mm256_loadu_ps(static_cast<const float*>(p) + i);
  } else {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i));
    if constexpr (D == Dtype::float16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
}

template <Dtype D, bool Residual, bool Decay>
inline __m256 accumulated8(const Source& s, size_t i, __m256 decay) {
  const __m256 x = load8<D>(s.gradient, i);
  if constexpr (!Residual) return x;
  __m256 r = _mm256_loadu_ps(s.residual + i);
  if constexpr (Decay) r = _mm256_mul_ps(r, decay);
  const __m256 most = _mm256_set1_ps(kMost), least = _mm256_set1_ps(-kMost);
  return _mm256_max_ps(_mm256_min_ps(_mm256_add_ps(r, x), most), least);
}

template <Dtype D, bool Residual, bool Decay>
inline __m256 accumulate8(const Source& s, size_t i, __m256 decay) {
  const __m256 x = accumulated8<D, Residual, Decay>(s, i, decay);
  if constexpr (Residual) _mm256_storeu_ps(s.residual + i, x);
  return x;
}

template <bool Ties>
inline uint32_t above(__m256 x, __m256 absolute, __m256 threshold) {
  const __m256 m = _mm256_and_ps(x, absolute);
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(m, threshold, Ties ? _CMP_GE_OQ : _CMP_GT_OQ)));
}

template <Dtype D, bool Residual, bool Decay, bool Ties>
size_t scan_as(const Source& s, size_t begin, size_t length, float threshold, uint32_t* offsets, float* values) {
  const auto* gradient = static_cast<const typename Load<D>::type*>(s.gradient);
  const __m256 decay = _mm256_set1_ps(s.decay);
  const __m256 limit = _mm256_set1_ps(threshold);
  const __m256 absolute = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  size_t kept = 0;
  const auto emit = [&](uint32_t mask, __m256 x, size_t i) {
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(permutations.lane[mask]));
    _mm256_storeu_ps(values + kept, _mm256_permutevar8x32_ps(x, order));
    const __m256i where = _mm256_add_epi32(order, _mm256_set1_epi32(int(i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets + kept), where);
    kept += size_t(_mm_popcnt_u32(mask));
  };
  size_t i = 0;
  for (; i + 32 <= length; i += 32) {
    if constexpr (Residual) {
      ahead(s.residual + begin + i);
      ahead(gradient + begin + i);
    }
    const __m256 a = accumulate8<D, Residual, Decay>(s, begin + i, decay);
    const __m256 b = accumulate8<D, Residual, Decay>(s, begin + i + 8, decay);
    const __m256 c = accumulate8<D, Residual, Decay>(s, begin + i + 16, decay);
    const __m256 d = accumulate8<D, Residual, Decay>(s, begin + i + 24, decay);
    const uint32_t ma = above<Ties>(a, absolute, limit), mb = above<Ties>(b, absolute, limit);
    const uint32_t mc = above<Ties>(c, absolute, limit), md = above<Ties>(d, absolute, limit);
    const uint32_t mask = ma | mb << 8 | mc << 16 | md << 24;
    const int count = _mm_popcnt_u32(mask);
    if (count <= kFew) {
      // Always write kFew entries and count only those that exist. A branch on whether there is any would often be
      // mispredicted, which costs more than the writes.
      uint32_t rest = mask;
      for (int few = 0; few < kFew; ++few, rest = _blsr_u32(rest)) {
        const size_t j = i + (_tzcnt_u32(rest) & 31);
        offsets[kept + size_t(few)] = uint32_t(j);
        values[kept + size_t(few)] = Residual ? s.residual[begin + j] : Load<D>::at(gradient, begin + j);
      }
      kept += size_t(count);
      continue;
    }
    emit(ma, a, i);
    emit(mb, b, i + 8);
    emit(mc, c, i + 16);
    emit(md, d, i + 24);
  }
  if (i < length) {
    // The portable pass takes the last elements, fewer than 32. It has the same arithmetic and order.
    const size_t more = scan_portable(s, begin + i, length - i, threshold, Ties, offsets + kept, values + kept);
    for (size_t j = 0; j < more; ++j) offsets[kept + j] += uint32_t(i);
    kept += more;
  }
  return kept;
}

template <Dtype D, bool Residual, bool Decay>
size_t with_ties(const Source& s, size_t begin, size_t length, float threshold, bool ties, uint32_t* offsets,
                 float* values) {
  return ties ? scan_as<D, Residual, Decay, true>(s, begin, length, threshold, offsets, values)
              : scan_as<D, Residual, Decay, false>(s, begin, length, threshold, offsets, values);
}

}  // namespace

size_t scan_avx2(const Source& s, size_t begin, size_t length, float threshold, bool ties, uint32_t* offsets,
                 float* values) {
  return with_dtype(s.dtype, [&]<Dtype D>() {
    if (!s.residual) return with_ties<D, false, false>(s, begin, length, threshold, ties, offsets, values);
    if (s.decay == 1.0f) return with_ties<D, true, false>(s, begin, length, threshold, ties, offsets, values);
    return with_ties<D, true, true>(s, begin, length, threshold, ties, offsets, values);
  });
}

namespace {

template <Dtype D, bool Residual, bool Decay>
size_t line_as(const Source& s, size_t begin, uint32_t floor, uint32_t* out) {
  const __m256 decay = _mm256_set1_ps(s.decay);
  const __m256i below = _mm256_set1_epi32(int(floor) - 1);  // the bits of magnitudes order like signed integers
  const __m256i absolute = _mm256_set1_epi32(0x7fffffff);
  size_t kept = 0;
  for (size_t i = begin; i < begin + kLine; i += 8) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(accumulated8<D, Residual, Decay>(s, i, decay)), absolute);
    const auto mask = uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below))));
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(permutations.lane[mask]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kept), _mm256_permutevar8x32_epi32(bits, order));
    kept += size_t(_mm_popcnt_u32(mask));
  }
  return kept;
}

}  // namespace

size_t line_above_avx2(const Source& s, size_t begin, uint32_t floor, uint32_t* out) {
  return with_dtype(s.dtype, [&]<Dtype D>() {
    if (!s.residual) return line_as<D, false, false>(s, begin, floor, out);
    if (s.decay == 1.0f) return line_as<D, true, false>(s, begin, floor, out);
    return line_as<D, true, true>(s, begin, floor, out);
  });
}

bool all_finite_avx2(const void* data, Dtype dtype, size_t n) {
  const size_t width = dtype == Dtype::float32 ? 4 : 2, bytes = n * width;
  const uint32_t one = dtype == Dtype::float32 ? 0x7f800000u : dtype == Dtype::float16 ? 0x7c007c00u : 0x7f807f80u;
  const __m256i exponent = _mm256_set1_epi32(int(one));
  const auto* p = static_cast<const uint8_t*>(data);
  const auto bad = [&](const uint8_t* q) {
    const __m256i x = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)), exponent);
    return width == 4 ? _mm256_cmpeq_epi32(x, exponent) : _mm256_cmpeq_epi16(x, exponent);
  };
  // With four streams one core reads memory nearly twice as fast as with one.
  constexpr size_t kStreams = 4;
  const size_t stream = bytes / kStreams / 64 * 64;
  __m256i found[kStreams] = {};
  for (size_t i = 0; i < stream; i += 64)
    for (size_t s = 0; s < kStreams; ++s) {
      const uint8_t* q = p + s * stream + i;
      found[s] = _mm256_or_si256(found[s], _mm256_or_si256(bad(q), bad(q + 32)));
    }
  for (size_t i = kStreams * stream; i < bytes; i += 64) {
    uint8_t tail[64] = {};
    __builtin_memcpy(tail, p + i, bytes - i < 64 ? bytes - i : 64);
    found[0] = _mm256_or_si256(found[0], _mm256_or_si256(bad(tail), bad(tail + 32)));
  }
  const __m256i any = _mm256_or_si256(_mm256_or_si256(found[0], found[1]), _mm256_or_si256(found[2], found[3]));
  return _mm256_testz_si256(any, any);
}

}  // namespace thinwire
#endif

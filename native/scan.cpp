// The portable pass, the choice between the passes, and accumulation without a selection.
#include "scan.hpp"

#include <atomic>
#include <limits>

namespace thinwire {
namespace {

template <Dtype D, bool Residual, bool Ties>
size_t scan_as(const Source& s, size_t begin, size_t length, float threshold, uint32_t* offsets, float* values) {
  const auto* g = static_cast<const typename Load<D>::type*>(s.gradient) + begin;
  float* r = Residual ? s.residual + begin : nullptr;
  size_t kept = 0;
  for (size_t i = 0; i < length; ++i) {
    float x = Load<D>::at(g, i);
    if constexpr (Residual) {
      x = saturate(s.decay == 1.0f ? r[i] + x : r[i] * s.decay + x);
      r[i] = x;
    }
    offsets[kept] = uint32_t(i);
    values[kept] = x;
    kept += Ties ? magnitude(x) >= threshold : magnitude(x) > threshold;
  }
  return kept;
}

#if defined(__x86_64__)
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
#else
bool cpu_has_avx2() { return false; }
#endif

std::atomic<bool> avx2_on{cpu_has_avx2()};

}  // namespace

size_t scan_portable(const Source& s, size_t begin, size_t length, float threshold, bool ties, uint32_t* offsets,
                     float* values) {
  return with_dtype(s.dtype, [&]<Dtype D>() {
    if (s.residual)
      return ties ? scan_as<D, true, true>(s, begin, length, threshold, offsets, values)
                  : scan_as<D, true, false>(s, begin, length, threshold, offsets, values);
    return ties ? scan_as<D, false, true>(s, begin, length, threshold, offsets, values)
                : scan_as<D, false, false>(s, begin, length, threshold, offsets, values);
  });
}

bool avx2_available() { return cpu_has_avx2(); }
void use_avx2(bool on) { avx2_on = on && cpu_has_avx2(); }
bool avx2_in_use() { return avx2_on; }

Scan scan_in_use() {
#if defined(__x86_64__)
  if (avx2_on) return scan_avx2;
#endif
  return scan_portable;
}

void accumulate(const Source& s, size_t begin, size_t end) {
  with_dtype(s.dtype, [&]<Dtype D>() {
    const auto* g = static_cast<const typename Load<D>::type*>(s.gradient);
    float* r = s.residual;
    const float decay = s.decay;  // a copy: the stores to r might change s.decay, as far as the compiler knows
    if (decay == 1.0f)
      for (size_t i = begin; i < end; ++i) r[i] = saturate(r[i] + Load<D>::at(g, i));
    else
      for (size_t i = begin; i < end; ++i) r[i] = saturate(r[i] * decay + Load<D>::at(g, i));
  });
}

void accumulate_momentum(const void* gradient, Dtype dtype, size_t n, float* u, float* v, float m, bool nesterov) {
  with_dtype(dtype, [&]<Dtype D>() {
    const auto* g = static_cast<const typename Load<D>::type*>(gradient);
    if (nesterov)
      for (size_t i = 0; i < n; ++i) {
        const float x = Load<D>::at(g, i);
        u[i] = saturate(u[i] + x) * m;
        v[i] = saturate(v[i] + (u[i] + x));
      }
    else
      for (size_t i = 0; i < n; ++i) {
        u[i] = saturate(u[i] * m + Load<D>::at(g, i));
        v[i] = saturate(v[i] + u[i]);
      }
  });
}

}  // namespace thinwire

// The constants and formulas of top-k selection are defined here only; Python calls them, too.
#include "cutoff.hpp"

#include <algorithm>
#include <cmath>

namespace thinwire {
namespace {

// A sample is copied. For very low densities a larger one would take more memory than its accuracy is worth.
constexpr uint64_t kMaxSample = uint64_t(1) << 21;
constexpr size_t kLarge = size_t(1) << 14;  // above this size an exact order statistic narrows the search first
constexpr double kFew = 0.2;                // candidates are copied only if they are at most this share of all

double rounded(double x) { return std::floor(x + 0.5); }

// The same vector, for the case that its sum has been written to the residual.
Vector after_accumulation(const Vector& v) {
  return v.source.residual ? Vector{{v.source.residual, Dtype::float32, nullptr, 1.0f}, v.n} : v;
}

void accumulate_all(std::vector<Vector>& vectors) {
  for (Vector& v : vectors) {
    if (v.source.residual) accumulate(v.source, 0, v.n);
    v = after_accumulation(v);
  }
}

// Finds the order statistic among the few magnitudes above a threshold that is estimated from a sample and somewhat
// too low. Returns false if the estimate was bad. The vectors are accumulated either way.
bool among_candidates(std::vector<Vector>& vectors, double n, uint64_t rank, OrderStatistic& found) {
  const double density = double(rank + 1) / n;
  const auto wanted = uint64_t(std::min(n / 8, double(kSampledAbove) / density));
  const double margin = 1.0 + 4.0 / std::sqrt(double(wanted) * density);
  const float guess = sampled_thresholds(vectors, {std::min(1.0, density * margin)}, wanted, 0)[0].value;
  const uint64_t capacity = uint64_t(double(rank + 1) * (2 * margin - 1.0)) + 4096;
  std::vector<float> candidates(capacity);
  uint64_t count = 0;
  for (Vector& v : vectors) {
    const uint64_t there = std::min(count, capacity);
    count += collect_above(v, guess, candidates.data() + there, capacity - there);
    v = after_accumulation(v);  // collecting adds the gradient to the residual in the same pass
  }
  if (count <= rank || count > capacity) return false;
  found = select({Vector{{candidates.data(), Dtype::float32, nullptr, 1.0f}, count}}, rank);
  return true;
}

}  // namespace

uint64_t entry_count(double density, uint64_t n) {
  return std::min(n, uint64_t(std::max(1.0, rounded(density * double(n)))));
}

uint64_t sample_size(double density, uint64_t n) {
  const auto wanted = uint64_t(std::min(double(kSampledAbove) / density, double(kMaxSample)));
  return 2 * wanted < n ? wanted : 0;
}

uint64_t allowed_ties(double threshold, double missing, uint64_t n) {
  return threshold > 0.0 ? uint64_t(std::max(0.0, rounded(missing * double(n)))) : 0;
}

Cutoff top_cutoff(Vector& v, double density, uint64_t step) {
  const uint64_t k = entry_count(density, v.n);
  if (k == v.n) return {0.0f, 0};
  if (const uint64_t wanted = sample_size(density, v.n)) {
    const SampledThreshold t = sampled_thresholds({v}, {density}, wanted, step)[0];
    return {t.value, allowed_ties(t.value, density - t.above, v.n)};
  }
  std::vector<Vector> alone{v};
  const OrderStatistic exact = order_statistic(alone, k - 1);
  v = alone[0];
  return {exact.value, exact.value > 0.0f ? k - exact.greater : 0};
}

OrderStatistic order_statistic(std::vector<Vector>& vectors, uint64_t rank) {
  uint64_t n = 0;
  for (const Vector& v : vectors) n += v.n;
  OrderStatistic found;
  if (n > kLarge) {
    const bool few = double(rank + 1) / double(n) <= kFew;
    if (few && among_candidates(vectors, double(n), rank, found)) return found;
    accumulate_all(vectors);
  }
  return select(vectors, rank);
}

}  // namespace thinwire

// Cuts. How much is sampled is what selection.py says, whose cuts by way of Python these are, to the bit.
#include "cuts.hpp"

#include <algorithm>
#include <cmath>

namespace thinwire {
namespace {

constexpr size_t kLarge = size_t(1) << 14;  // above it an exact order statistic narrows the search first
constexpr double kFew = 0.2;                // candidates are copied only while they are few
constexpr double kExceed = 1500;            // entries above the threshold that a sample should hold
constexpr double kMostSampled = 1 << 21;

void settle(std::vector<Vector>& vectors) {
  for (Vector& v : vectors) {
    if (v.source.memory) accumulate(v.source, v.n);
    v = written(v);
  }
}

// Answers from the few magnitudes above a low sampled guess; false if the guess was bad. It settles the vectors.
bool among_candidates(std::vector<Vector>& vectors, double n, uint64_t rank, OrderStatistic& found) {
  const double density = double(rank + 1) / n;
  const auto wanted = uint64_t(std::min(n / 8, kExceed / density));
  const double margin = 1.0 + 4.0 / std::sqrt(double(wanted) * density);
  const float guess = sampled_thresholds(vectors, {std::min(1.0, density * margin)}, wanted, 0)[0].value;
  const uint64_t capacity = uint64_t(double(rank + 1) * (2 * margin - 1.0)) + 4096;
  std::vector<float> candidates(capacity);
  uint64_t count = 0;
  for (Vector& v : vectors) {
    const uint64_t there = std::min(count, capacity);
    count += collect_above(v, guess, candidates.data() + there, capacity - there);
    v = written(v);  // the same pass adds gradient and memory
  }
  if (count <= rank || count > capacity) return false;
  found = select({Vector{{candidates.data(), Dtype::float32, nullptr, 1.0f}, count}}, rank);
  return true;
}

}  // namespace

Vector written(const Vector& v) {
  return v.source.memory ? Vector{{v.source.memory, Dtype::float32, nullptr, 1.0f}, v.n} : v;
}

OrderStatistic order_statistic(std::vector<Vector>& vectors, uint64_t rank) {
  uint64_t n = 0;
  for (const Vector& v : vectors) n += v.n;
  OrderStatistic found;
  if (n > kLarge) {
    const bool few = double(rank + 1) / double(n) <= kFew;
    if (few && among_candidates(vectors, double(n), rank, found)) return found;
    settle(vectors);
  }
  return select(vectors, rank);
}

Cut top_cut(Vector& v, double density, uint64_t step) {
  const double n = double(v.n);
  const auto k = uint64_t(std::min(n, std::max(1.0, std::floor(density * n + 0.5))));
  if (k == v.n) return {0.0f, 0};
  const auto wanted = uint64_t(std::min(kExceed / density, kMostSampled));
  if (2 * wanted < v.n) {
    const SampledThreshold t = sampled_thresholds({v}, {density}, wanted, step)[0];
    const double missing = std::max(0.0, std::floor((density - t.above) * n + 0.5));
    return {t.value, t.value > 0.0f ? uint64_t(missing) : 0};
  }
  std::vector<Vector> alone{v};
  const OrderStatistic exact = order_statistic(alone, k - 1);
  v = alone[0];
  return {exact.value, exact.value > 0.0f ? k - exact.greater : 0};
}

}  // namespace thinwire

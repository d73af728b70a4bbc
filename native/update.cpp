// The loops are simple enough for the compiler to vectorise; the copies for AVX2 and AVX-512 compute the same bits.
#include "update.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#if defined(__x86_64__) && defined(__GLIBC__)
#define THINWIRE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define THINWIRE_CLONES
#endif

namespace thinwire {
namespace {

template <Dtype D>
inline float rounded(float x) {
  if constexpr (D == Dtype::float16) return from_float16(to_float16(x));
  if constexpr (D == Dtype::bfloat16) return from_bfloat16(to_bfloat16(x));
  return x;
}

template <Dtype D>
inline bool accumulate_as(const float* shared, float* residual, const typename Load<D>::type* local, float ahead,
                          float decay, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    const float r = residual[i];
    const float change = rounded<D>(shared[i] - r * ahead) - Load<D>::at(local, i);
    const bool finite = magnitude_bits(change) < 0x7f800000u;
    bad |= !finite;
    const float sum = saturate(r * decay + change);  // a decay of 1 leaves the product exact
    residual[i] = finite ? sum : r;
  }
  return bad == 0;
}

// Each type has a function of its own, because such copies cannot be made of templates.
THINWIRE_CLONES bool accumulate_float32(const float* s, float* r, const float* p, float ahead, float decay, size_t n) {
  return accumulate_as<Dtype::float32>(s, r, p, ahead, decay, n);
}
bool accumulate_float16(const float* s, float* r, const uint16_t* p, float ahead, float decay, size_t n) {
  return accumulate_as<Dtype::float16>(s, r, p, ahead, decay, n);
}
THINWIRE_CLONES bool accumulate_bfloat16(const float* s, float* r, const uint16_t* p, float ahead, float decay,
                                         size_t n) {
  return accumulate_as<Dtype::bfloat16>(s, r, p, ahead, decay, n);
}

// row[j] += left[k] * right[k][j] for four k, in their order.
THINWIRE_CLONES void add_four(float* __restrict row, size_t n, const float* left, const float* __restrict a,
                              const float* __restrict b, const float* __restrict c, const float* __restrict d) {
  const float w = left[0], x = left[1], y = left[2], z = left[3];
  for (size_t j = 0; j < n; ++j) row[j] = (((row[j] + w * a[j]) + x * b[j]) + y * c[j]) + z * d[j];
}

THINWIRE_CLONES void add_one(float* __restrict row, size_t n, float left, const float* __restrict right) {
  for (size_t j = 0; j < n; ++j) row[j] = row[j] + left * right[j];
}

// Independent sums in a fixed order, so that the result does not depend on the width of the machine's vectors.
THINWIRE_CLONES double dot(const double* a, const double* b, size_t n) {
  constexpr size_t kLanes = 16;
  double sums[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  for (size_t half = kLanes / 2; half; half /= 2)
    for (size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

THINWIRE_CLONES void subtract(double* __restrict vector, const double* __restrict other, double part, size_t n) {
  for (size_t i = 0; i < n; ++i) vector[i] -= part * other[i];
}

// Subtracts from `vector` its parts along `count` orthonormal vectors. If little is left, a second round removes what
// rounding left of them.
void remove_parts(double* vector, const double* basis, size_t count, size_t n) {
  const double before = dot(vector, vector, n);
  for (int round = 0; round < 2; ++round) {
    for (size_t k = 0; k < count; ++k) subtract(vector, basis + k * n, dot(vector, basis + k * n, n), n);
    if (dot(vector, vector, n) > 0.01 * before) return;
  }
}

bool normalise(double* vector, size_t n, double least) {
  const double norm = std::sqrt(dot(vector, vector, n));
  if (!(norm > least)) return false;
  for (size_t i = 0; i < n; ++i) vector[i] /= norm;
  return true;
}

}  // namespace

bool accumulate_update(const float* shared, float* residual, Parameters local, float ahead, float decay, size_t n) {
  const auto* half = static_cast<const uint16_t*>(local.data);
  switch (local.dtype) {
    case Dtype::float16: return accumulate_float16(shared, residual, half, ahead, decay, n);
    case Dtype::bfloat16: return accumulate_bfloat16(shared, residual, half, ahead, decay, n);
    default: return accumulate_float32(shared, residual, static_cast<const float*>(local.data), ahead, decay, n);
  }
}

void set_low_rank(float* out, size_t rows, size_t columns, size_t rank, const float* left, const float* right) {
  constexpr size_t kColumns = 2048;  // of a row that stay in the first cache while all products are added
  for (size_t begin = 0; begin < columns; begin += kColumns) {
    const size_t n = std::min(kColumns, columns - begin);
    for (size_t i = 0; i < rows; ++i) {
      float* row = out + i * columns + begin;
      const float* at = right + begin;
      std::fill(row, row + n, 0.0f);
      size_t k = 0;
      for (; k + 4 <= rank; k += 4, at += 4 * columns) {
        const float factors[4] = {left[k * rows + i], left[(k + 1) * rows + i], left[(k + 2) * rows + i],
                                  left[(k + 3) * rows + i]};
        add_four(row, n, factors, at, at + columns, at + 2 * columns, at + 3 * columns);
      }
      for (; k < rank; ++k, at += columns) add_one(row, n, left[k * rows + i], at);
    }
  }
}

void orthonormalise(float* vectors, size_t rank, size_t length, uint64_t seed) {
  std::vector<double> basis(vectors, vectors + rank * length);
  for (size_t k = 0; k < rank; ++k) {
    double* vector = basis.data() + k * length;
    const double before = std::sqrt(dot(vector, vector, length));
    remove_parts(vector, basis.data(), k, length);
    // What is left of a dependent vector is rounding error, which has no direction of its own.
    bool found = before > 0x1p-120 && normalise(vector, length, before * 1e-6);
    for (uint64_t attempt = 0; !found; ++attempt) {
      for (size_t i = 0; i < length; ++i)
        vector[i] = double(int64_t(mix(mix(seed + attempt) ^ (k * length + i)) >> 11)) * 0x1p-53 - 0.5;
      remove_parts(vector, basis.data(), k, length);
      found = normalise(vector, length, 1e-6);
    }
  }
  for (size_t i = 0; i < basis.size(); ++i) vectors[i] = float(basis[i]);
}

THINWIRE_CLONES void correct_adam(float* parameters, const float* mean, const float* square, size_t n, AdamStep step,
                                  float workers) {
  for (size_t i = 0; i < n; ++i) {
    const float m = mean[i] / step.mean_correction, v = square[i] / step.square_correction;
    const float signal = std::min(m * m, v);
    const float corrected = signal + (v - signal) / workers;
    const float wanted = m / (std::sqrt(corrected) + step.epsilon), made = m / (std::sqrt(v) + step.epsilon);
    parameters[i] -= step.lr * (wanted - made);
  }
}

}  // namespace thinwire

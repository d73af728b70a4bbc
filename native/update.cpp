// The loops are simple enough for the compiler to vectorise; the copies for AVX2 and AVX-512 compute the same bits.
#include "update.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
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

// Vectors of the compiler: it splits them where a machine's are shorter, so that all machines compute the same bits.
using Floats = float __attribute__((vector_size(32), aligned(4), may_alias));
using Doubles = double __attribute__((vector_size(32)));
constexpr size_t kFloats = 8, kDoubles = 4;
// What is part of several functions with clones has to become part of each clone.
#define THINWIRE_INLINE __attribute__((always_inline)) inline

// Elements [row, row + R) x [column, column + 2 * kFloats) of a product, which stay in registers while all `rank` outer
// products are added, in their order.
template <size_t R, bool Subtract>
THINWIRE_INLINE void product_tile(float* out, size_t columns, size_t rows, size_t rank, const float* left, const float* right) {
  Floats sums[R][2] = {};
  for (size_t k = 0; k < rank; ++k, left += rows, right += columns) {
    const Floats a = *reinterpret_cast<const Floats*>(right), b = *reinterpret_cast<const Floats*>(right + kFloats);
#pragma GCC unroll 4
    for (size_t r = 0; r < R; ++r) {
      sums[r][0] = sums[r][0] + left[r] * a;
      sums[r][1] = sums[r][1] + left[r] * b;
    }
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      auto& place = *reinterpret_cast<Floats*>(out + r * columns + half * kFloats);
      place = Subtract ? place - sums[r][half] : sums[r][half];
    }
  }
}

template <bool Subtract>
THINWIRE_INLINE void product_element(float* out, size_t columns, size_t rows, size_t rank, const float* left,
                            const float* right) {
  float sum = 0.0f;
  for (size_t k = 0; k < rank; ++k) sum = sum + left[k * rows] * right[k * columns];
  *out = Subtract ? *out - sum : sum;
}

template <bool Subtract>
THINWIRE_INLINE void product(float* out, size_t rows, size_t columns, size_t rank, const float* left, const float* right) {
  constexpr size_t kRows = 4, kColumns = 2 * kFloats;
  for (size_t j = 0; j < columns; j += kColumns) {
    const size_t width = std::min(kColumns, columns - j);
    size_t i = 0;
    if (width == kColumns) {
      for (; i + kRows <= rows; i += kRows)
        product_tile<kRows, Subtract>(out + i * columns + j, columns, rows, rank, left + i, right + j);
      for (; i < rows; ++i)
        product_tile<1, Subtract>(out + i * columns + j, columns, rows, rank, left + i, right + j);
    }
    for (; i < rows; ++i)
      for (size_t c = j; c < j + width; ++c)
        product_element<Subtract>(out + i * columns + c, columns, rows, rank, left + i, right + c);
  }
}

THINWIRE_CLONES void set_product(float* out, size_t rows, size_t columns, size_t rank, const float* left,
                                 const float* right) {
  product<false>(out, rows, columns, rank, left, right);
}

THINWIRE_CLONES void subtract_product(float* out, size_t rows, size_t columns, size_t rank, const float* left,
                                      const float* right) {
  product<true>(out, rows, columns, rank, left, right);
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

// The products of all pairs of vectors, as the lower triangle of a matrix.
THINWIRE_CLONES void pairwise_dots(const double* vectors, size_t rank, size_t length, double* dots) {
  constexpr size_t kPairs = 4;
  const size_t whole = length / kDoubles * kDoubles;
  for (size_t a = 0; a < rank; ++a) {
    const double* x = vectors + a * length;
    for (size_t b = 0; b <= a; b += kPairs) {
      const double* y[kPairs];
      for (size_t p = 0; p < kPairs; ++p) y[p] = vectors + std::min(b + p, a) * length;
      Doubles sums[kPairs] = {};
      for (size_t i = 0; i < whole; i += kDoubles) {
        Doubles left, right;
        std::memcpy(&left, x + i, sizeof left);
#pragma GCC unroll 4
        for (size_t p = 0; p < kPairs; ++p) {
          std::memcpy(&right, y[p] + i, sizeof right);
          sums[p] += left * right;
        }
      }
      for (size_t p = 0; p < kPairs && b + p <= a; ++p) {
        double sum = (sums[p][0] + sums[p][1]) + (sums[p][2] + sums[p][3]);
        for (size_t i = whole; i < length; ++i) sum += x[i] * y[p][i];
        dots[a * rank + b + p] = sum;
      }
    }
  }
}

// Replaces a positive definite matrix, given by its lower triangle, by the inverse of its Cholesky factor. Returns false
// if one of the vectors nearly depends on those before it: the result would be inexact.
bool inverse_cholesky(std::vector<double>& matrix, size_t n) {
  for (size_t k = 0; k < n; ++k) {
    for (size_t j = 0; j <= k; ++j) {
      double sum = matrix[k * n + j];
      for (size_t i = 0; i < j; ++i) sum -= matrix[k * n + i] * matrix[j * n + i];
      if (j < k) {
        matrix[k * n + j] = sum / matrix[j * n + j];
      } else {
        if (!(sum > 1e-9 * matrix[k * n + k]) || !(sum > 0x1p-240)) return false;
        matrix[k * n + k] = std::sqrt(sum);
      }
    }
  }
  for (size_t j = 0; j < n; ++j) {
    matrix[j * n + j] = 1.0 / matrix[j * n + j];
    for (size_t k = j + 1; k < n; ++k) {
      double sum = 0.0;
      for (size_t i = j; i < k; ++i) sum -= matrix[k * n + i] * matrix[i * n + j];
      matrix[k * n + j] = sum / matrix[k * n + k];
    }
  }
  return true;
}

// out[k] = the sum of factors[k][j] * vectors[j] over j <= k, in the order of j. `part` has room for kPart elements of
// every vector: they are used by all sums, and would share few lines of the cache where the vectors lie.
constexpr size_t kPart = 4 * kDoubles;
THINWIRE_CLONES void multiply_lower(const double* factors, const double* vectors, size_t rank, size_t length,
                                    double* part, float* out) {
  for (size_t i = 0; i < length; i += kPart) {
    const size_t width = std::min(kPart, length - i);
    for (size_t j = 0; j < rank; ++j) std::copy_n(vectors + j * length + i, width, part + j * kPart);
    for (size_t k = 0; k < rank; ++k) {
      const double *factor = factors + k * rank, *at = part;
      Doubles sums[kPart / kDoubles] = {};
      for (size_t j = 0; j <= k; ++j, at += kPart) {
#pragma GCC unroll 4
        for (size_t p = 0; p < kPart / kDoubles; ++p) {
          Doubles vector;
          std::memcpy(&vector, at + p * kDoubles, sizeof vector);
          sums[p] += factor[j] * vector;
        }
      }
      for (size_t c = 0; c < width; ++c) out[k * length + i + c] = float(sums[c / kDoubles][c % kDoubles]);
    }
  }
}

// Orthonormal vectors by the Cholesky factor of their products, which takes two passes of products without any order
// among the vectors. Returns false, and writes nothing, if the vectors are nearly dependent.
bool orthonormalise_at_once(const std::vector<double>& basis, float* out, size_t rank, size_t length) {
  std::vector<double> dots(rank * rank);
  pairwise_dots(basis.data(), rank, length, dots.data());
  if (!inverse_cholesky(dots, rank)) return false;
  std::vector<double> part(rank * kPart);
  multiply_lower(dots.data(), basis.data(), rank, length, part.data(), out);
  return true;
}

// Orthonormal vectors by Gram and Schmidt's method, which copes with dependent ones.
void orthonormalise_in_turn(std::vector<double>& basis, float* out, size_t rank, size_t length, uint64_t seed) {
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
  for (size_t i = 0; i < basis.size(); ++i) out[i] = float(basis[i]);
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

THINWIRE_CLONES void look_ahead(float* parameters, float* shared, const float* residual, float ahead, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const float p = parameters[i], s = shared[i], start = p == s ? s : p;
    shared[i] = start;
    parameters[i] = start - residual[i] * ahead;
  }
}

// Element i depends on no other element, even where the mean lies in the memory of the parameters.
THINWIRE_CLONES void apply_mean(float* parameters, float* shared, const float* mean, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const float s = shared[i] - mean[i];
    shared[i] = s;
    parameters[i] = s;
  }
}

void set_low_rank(const LowRank& x, float* matrix) {
  if (x.rank == 0)
    std::memcpy(matrix, x.coordinates, x.rows * x.columns * sizeof(float));
  else if (x.of_rows)
    set_product(matrix, x.rows, x.columns, x.rank, x.coordinates, x.vectors);
  else
    set_product(matrix, x.rows, x.columns, x.rank, x.vectors, x.coordinates);
}

void subtract_low_rank(const LowRank& x, float* matrix) {
  if (x.rank == 0)
    for (size_t i = 0; i < x.rows * x.columns; ++i) matrix[i] -= x.coordinates[i];
  else if (x.of_rows)
    subtract_product(matrix, x.rows, x.columns, x.rank, x.coordinates, x.vectors);
  else
    subtract_product(matrix, x.rows, x.columns, x.rank, x.vectors, x.coordinates);
}

bool next_basis(const LowRank& x, float* next, uint64_t seed) {
  const size_t length = x.of_rows ? x.rows : x.columns, size = x.rank * length;
  if (std::all_of(x.coordinates, x.coordinates + size, [](float c) { return c == 0.0f; })) return false;
  std::memcpy(next, x.coordinates, size * sizeof(float));
  orthonormalise(next, x.rank, length, seed);
  return true;
}

void orthonormalise(float* vectors, size_t rank, size_t length, uint64_t seed) {
  std::vector<double> basis(vectors, vectors + rank * length);
  if (!orthonormalise_at_once(basis, vectors, rank, length)) orthonormalise_in_turn(basis, vectors, rank, length, seed);
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

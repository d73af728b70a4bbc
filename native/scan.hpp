// The main pass: accumulates into the residual, compares, and compacts the selected entries. It reads and writes each
// element once.
#pragma once
#include "common.hpp"

namespace thinwire {

// Where the accumulated vector comes from: residual = decay * residual + gradient, or the gradient alone.
struct Source {
  const void* gradient;
  Dtype dtype;
  float* residual;  // null: nothing is accumulated, the gradient itself is scanned
  float decay;
};

struct Vector {
  Source source;
  size_t n;
};

constexpr size_t kChunk = 4096;

// Elements that a scan may write beyond the entries that it returns, because it stores whole SIMD vectors.
constexpr size_t kSlack = 8;

// Scans [begin, begin + length), length <= kChunk. Writes entries with |x| > threshold, or >= with `ties`, to offsets
// (relative to begin) and values, in order; returns how many. Both need room for kChunk + kSlack elements.
using Scan = size_t (*)(const Source&, size_t begin, size_t length, float threshold, bool ties, uint32_t* offsets,
                        float* values);

size_t scan_portable(const Source&, size_t, size_t, float, bool, uint32_t*, float*);
size_t scan_avx2(const Source&, size_t, size_t, float, bool, uint32_t*, float*);

bool avx2_available();
void use_avx2(bool on);  // for tests; without effect where the machine has no AVX2
bool avx2_in_use();
Scan scan_in_use();

// residual = decay * residual + gradient over the elements [begin, end), without a selection.
void accumulate(const Source&, size_t begin, size_t end);

// DGC: u = m u + g, v += u; with nesterov u = m (u + g), v += u + g.
void accumulate_momentum(const void* gradient, Dtype, size_t n, float* u, float* v, float m, bool nesterov);

}  // namespace thinwire

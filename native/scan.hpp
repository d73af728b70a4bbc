// The hot pass: accumulate into the memory, compare, compact the survivors; one read and one write of each element.
#pragma once
#include "common.hpp"

namespace thinwire {

// Where the accumulated vector comes from: memory = decay * memory + gradient, or the gradient alone.
struct Source {
  const void* gradient;
  Dtype dtype;
  float* memory;  // null: nothing is accumulated, the gradient itself is scanned
  float decay;
};

constexpr size_t kChunk = 4096;

// Elements that a scan may write beyond the survivors that it reports: whole vectors are stored.
constexpr size_t kSlack = 8;

// Scans [begin, begin + length), length <= kChunk. Survivors (|x| > threshold, or >= if `ties`) go to
// offsets (relative to begin) and values, in order; returns how many. Both need kChunk + kSlack places.
using Scan = size_t (*)(const Source&, size_t begin, size_t length, float threshold, bool ties, uint32_t* offsets,
                        float* values);

size_t scan_portable(const Source&, size_t, size_t, float, bool, uint32_t*, float*);
size_t scan_avx2(const Source&, size_t, size_t, float, bool, uint32_t*, float*);

bool avx2_available();
void use_avx2(bool on);  // for tests; on is ignored where the machine has none
bool avx2_in_use();
Scan scan_in_use();

// memory = decay * memory + gradient over n elements, nothing selected.
void accumulate(const Source&, size_t n);

// DGC: u = m u + g, v += u; with nesterov u = m (u + g), v += u + g.
void accumulate_momentum(const void* gradient, Dtype, size_t n, float* u, float* v, float m, bool nesterov);

}  // namespace thinwire

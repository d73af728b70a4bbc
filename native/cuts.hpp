// Where a vector is cut: exact order statistics that settle the memory on their way, and the threshold of a top-k.
#pragma once
#include "statistics.hpp"
#include "writer.hpp"

namespace thinwire {

// The magnitude of a rank (0 = largest) over all vectors together, exactly. Every element of a large vector is read
// more than once: then the memory holds the sum afterwards, and the vectors are changed to say so.
OrderStatistic order_statistic(std::vector<Vector>&, uint64_t rank);

// The cut of a sampled top-k, as TopK in selection.py makes it: thresholds come from a sample, or are exact where a
// sample would be most of the vector.
Cut top_cut(Vector&, double density, uint64_t step);

// The same vector, after its sum was written to the memory.
Vector written(const Vector&);

}  // namespace thinwire

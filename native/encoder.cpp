// The way out in one call: interpreting it tensor by tensor takes longer than the kernels where caches are cold.
#include "encoder.hpp"

namespace thinwire {

Encoded Encoder::encode(double density, uint64_t step, uint8_t* room, size_t capacity) const {
  Encoded found;
  // 1. Nothing that is not finite may enter a memory: look at all tensors before the first changes.
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Vector& v = tensors_[i].vector;
    if (!all_finite(v.source.gradient, v.source.dtype, v.n)) {
      found.not_finite = int64_t(i);
      return found;
    }
  }
  Writer writer(room, capacity);
  // 2. Choose. Exact cuts of middle-sized tensors add gradient and memory here already.
  std::vector<Vector> vectors;
  std::vector<Cut> cuts;
  for (const Tensor& t : tensors_) {
    vectors.push_back(t.vector);
    cuts.push_back(t.whole ? Cut{-1.0f, 0} : top_cut(vectors.back(), density, step));
  }
  // 3. Write, and put back what does not travel.
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[i];
    const Written w = writer.add_selected(uint32_t(i), vectors[i].source, vectors[i].n, {t.held, nullptr}, cuts[i],
                                          t.format, {}, t.reserve);
    found.sent.push_back(w.sent);
  }
  found.length = writer.finish(0, true);
  return found;
}

}  // namespace thinwire

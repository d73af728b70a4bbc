// The encoder of a bucket. With cold caches, interpreting these steps tensor by tensor takes longer than the kernels.
#include "encoder.hpp"

namespace thinwire {

Encoded Encoder::encode(double density, uint64_t step, uint8_t* buffer, size_t capacity) const {
  Encoded found;
  // 1. A value that is not finite must not enter a residual: check all tensors before the first one changes.
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Vector& v = tensors_[i].section.vector;
    if (!all_finite(v.source.gradient, v.source.dtype, v.n)) {
      found.not_finite = int64_t(i);
      return found;
    }
  }
  Writer writer(buffer, capacity);
  // 2. Choose the cutoffs. The exact cutoff of a medium-sized tensor accumulates its residual here.
  std::vector<SectionInput> sections;
  std::vector<Cutoff> cutoffs;
  for (const Tensor& t : tensors_) {
    sections.push_back(t.section);
    cutoffs.push_back(t.whole ? Cutoff{-1.0f, 0} : top_cutoff(sections.back().vector, density, step));
  }
  // 3. Write the sections. What is not sent stays in the residuals.
  for (size_t i = 0; i < tensors_.size(); ++i)
    found.sent.push_back(writer.add_selected(sections[i], cutoffs[i], tensors_[i].reserve).sent);
  found.length = writer.finish(0, true);
  return found;
}

}  // namespace thinwire

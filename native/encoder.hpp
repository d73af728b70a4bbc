// The encoder of a bucket: from gradients to a frame in one call, for tensors that stay in place from step to step.
#pragma once
#include <vector>

#include "cutoff.hpp"

namespace thinwire {

struct Encoded {
  int64_t not_finite = -1;     // the first tensor that holds an infinity or a NaN; nothing was written or changed then
  size_t length = 0;           // of the frame
  std::vector<uint64_t> sent;  // the number of entries of each tensor
};

// Encodes a sampled top-k of every tensor, and small tensors whole, into one frame. The bytes are the same as with the
// steps called from Python one by one.
class Encoder {
 public:
  struct Tensor {
    SectionInput section;
    bool whole;
    size_t reserve;  // bytes to keep free for the tensors after it
  };
  explicit Encoder(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}
  Encoded encode(double density, uint64_t step, uint8_t* buffer, size_t capacity) const;

 private:
  std::vector<Tensor> tensors_;
};

}  // namespace thinwire

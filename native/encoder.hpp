// Everything between the gradients of a bucket and its frame, for tensors that stay in their places from step to step.
#pragma once
#include <vector>

#include "cuts.hpp"

namespace thinwire {

struct Encoded {
  int64_t not_finite = -1;     // the first tensor that holds an infinity or a NaN: then nothing was written or changed
  size_t length = 0;           // of the frame
  std::vector<uint64_t> sent;  // entries of every tensor
};

// A sampled top-k of every tensor, small ones whole; one frame. The same bytes as step by step from Python.
class Encoder {
 public:
  struct Tensor {
    Vector vector;
    float* held;  // what is not sent stays here; null: dropped
    bool whole;
    Format format;
    size_t reserve;  // bytes to leave free for the tensors after it
  };
  explicit Encoder(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}
  Encoded encode(double density, uint64_t step, uint8_t* room, size_t capacity) const;

 private:
  std::vector<Tensor> tensors_;
};

}  // namespace thinwire

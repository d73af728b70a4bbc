// Kernels of the update domain: what an optimizer changed, low-rank products, orthonormal bases, Adam's noise correction.
#pragma once
#include "common.hpp"

namespace thinwire {

// Adds to the residual what an optimizer step changed: residual = decay * residual + (start - local), where the step
// began at start = shared - ahead * residual in the type of the local parameters. An element whose change is not finite
// keeps its residual. Returns whether all changes were finite.
struct Parameters {
  const void* data;
  Dtype dtype;
};
bool accumulate_update(const float* shared, float* residual, Parameters local, float ahead, float decay, size_t n);

// Begins a step: parameters = shared - ahead * residual, rounded as above. What was written to parameters since they
// showed the shared values is adopted by these first.
void look_ahead(float* parameters, float* shared, const float* residual, float ahead, size_t n);

// Ends a step: subtracts the mean from the shared values and shows them. The mean may lie where the parameters do.
void apply_mean(float* parameters, float* shared, const float* mean, size_t n);

// Sets out, a matrix of rows x columns, to the sum of `rank` outer products left[k] right[k], added in the order of k.
// All machines compute the same bits.
void set_low_rank(float* out, size_t rows, size_t columns, size_t rank, const float* left, const float* right);

// Subtracts such a sum from out.
void subtract_low_rank(float* out, size_t rows, size_t columns, size_t rank, const float* left, const float* right);

// Makes `rank` vectors of `length` elements orthonormal in float64 and a fixed order of additions, as Gram and Schmidt's
// method does, so that all machines compute the same bits. A vector that depends on those before it is replaced by a random one,
// which the seed determines. rank <= length.
void orthonormalise(float* vectors, size_t rank, size_t length, uint64_t seed);

// A step of Adam: lr * mean / (sqrt(square) + epsilon), with bias-corrected moments.
struct AdamStep {
  float lr, mean_correction, square_correction, epsilon;
};

// Moves parameters after a local step of Adam to where the step would have led if its second moments had the noise of
// `workers` batches instead of one.
void correct_adam(float* parameters, const float* mean, const float* square, size_t n, AdamStep step, float workers);

}  // namespace thinwire

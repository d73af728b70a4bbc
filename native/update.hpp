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

// A matrix of rows x columns as the sum of `rank` outer products, added in their order, so that all machines compute
// the same bits. One factor of each is a vector of a basis, as long as a row or as a column, the other its coordinates.
// With a rank of 0 the coordinates are the elements themselves.
struct LowRank {
  size_t rows, columns, rank;
  bool of_rows;
  const float *vectors, *coordinates;
};

// Sets a matrix to such a sum, or subtracts the sum from it.
void set_low_rank(const LowRank& x, float* matrix);
void subtract_low_rank(const LowRank& x, float* matrix);

// Writes the next basis: the coordinates, made orthonormal. Returns false if all of them are zero, and writes nothing.
bool next_basis(const LowRank& x, float* next, uint64_t seed);

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

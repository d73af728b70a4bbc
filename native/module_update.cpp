// Python bindings of the kernels of the update domain.
#include "bindings.hpp"
#include "update.hpp"

void bind_update(nb::module_& m) {
  // All but `orthonormalise` take all parameters in one call, because most models have many small ones.
  // For each parameter: addresses of its start and residual, the local parameter, and how far it looked ahead.
  using Changed = std::tuple<Address, Address, ArrayArgs, float>;
  m.def("accumulate_updates", [](const std::vector<Changed>& parameters, float decay) {
    nb::gil_scoped_release release;
    std::vector<bool> finite;
    for (const auto& [start, residual, local, ahead] : parameters) {
      const auto& [data, dtype, n] = local;
      finite.push_back(accumulate_update(at<const float>(start), at<float>(residual),
                                         {at<const void>(data), Dtype(dtype)}, ahead, decay, n));
    }
    return finite;
  });
  // For each parameter: addresses of parameter, shared values, and residual or mean; elements.
  using Shown = std::tuple<Address, Address, Address, size_t>;
  m.def("look_ahead", [](const std::vector<Shown>& parameters, float ahead) {
    nb::gil_scoped_release release;
    for (const auto& [p, shared, residual, n] : parameters)
      look_ahead(at<float>(p), at<float>(shared), at<const float>(residual), ahead, n);
  });
  m.def("apply_means", [](const std::vector<Shown>& parameters) {
    nb::gil_scoped_release release;
    for (const auto& [p, shared, mean, n] : parameters)
      apply_mean(at<float>(p), at<float>(shared), at<const float>(mean), n);
  });
  // For each matrix: rows, columns, rank, whether the vectors are as long as a row; addresses of the vectors, the
  // coordinates and the matrix. With a rank of 0 the coordinates are the elements themselves.
  using Product = std::tuple<size_t, size_t, size_t, bool, Address, Address, Address>;
  m.def("subtract_low_rank", [](const std::vector<Product>& matrices) {
    nb::gil_scoped_release release;
    for (const auto& [rows, columns, rank, of_rows, vectors, coordinates, matrix] : matrices)
      subtract_low_rank({rows, columns, rank, of_rows, at<const float>(vectors), at<const float>(coordinates)},
                        at<float>(matrix));
  });
  // The same, then the seed and the address of the next basis, or 0 where it is not wanted.
  using Expanded = std::tuple<size_t, size_t, size_t, bool, Address, Address, Address, uint64_t, Address>;
  m.def("expand_low_rank", [](const std::vector<Expanded>& matrices) {
    nb::gil_scoped_release release;
    std::vector<bool> advanced;
    for (const auto& [rows, columns, rank, of_rows, vectors, coordinates, matrix, seed, next] : matrices) {
      const LowRank x{rows, columns, rank, of_rows, at<const float>(vectors), at<const float>(coordinates)};
      set_low_rank(x, at<float>(matrix));
      advanced.push_back(next && next_basis(x, at<float>(next), seed));
    }
    return advanced;
  });
  m.def("orthonormalise", [](Address vectors, size_t rank, size_t length, uint64_t seed) {
    if (rank > length) throw std::invalid_argument("there are no more orthonormal vectors than elements of a vector");
    nb::gil_scoped_release release;
    orthonormalise(at<float>(vectors), rank, length, seed);
  });
  // For each parameter: addresses of parameter, mean and square, elements, then the members of AdamStep.
  using AdamArgs = std::tuple<Address, Address, Address, size_t, float, float, float, float>;
  m.def("correct_adam", [](const std::vector<AdamArgs>& parameters, float workers) {
    nb::gil_scoped_release release;
    for (const auto& [p, mean, square, n, lr, mean_correction, square_correction, epsilon] : parameters)
      correct_adam(at<float>(p), at<const float>(mean), at<const float>(square), n,
                   {lr, mean_correction, square_correction, epsilon}, workers);
  });
}

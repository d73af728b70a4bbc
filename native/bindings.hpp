// How Python passes addresses, vectors and sections to the kernels.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "statistics.hpp"
#include "writer.hpp"

namespace nb = nanobind;
using namespace thinwire;

using Address = uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

// (address, dtype, number of elements)
using ArrayArgs = std::tuple<Address, int, size_t>;
// (address of the gradient, dtype, address of the residual or 0, decay, number of elements)
using VectorArgs = std::tuple<Address, int, Address, float, size_t>;
// (id, vector, address of what is kept or 0, address of the mask or 0, format, whether rounding is stochastic, seed)
using SectionArgs = std::tuple<uint32_t, VectorArgs, Address, Address, int, bool, uint64_t>;
// (id, addresses of positions and values, how many, elements of the tensor, address for the values as sent, format,
// whether rounding is stochastic, its seed)
using EntriesArgs = std::tuple<uint32_t, Address, Address, uint64_t, size_t, Address, int, bool, uint64_t>;

inline Vector vector_of(const VectorArgs& args) {
  const auto& [gradient, dtype, residual, decay, n] = args;
  return {{at<const void>(gradient), Dtype(dtype), at<float>(residual), decay}, n};
}

inline std::vector<Vector> vectors_of(const std::vector<VectorArgs>& all) {
  std::vector<Vector> vectors;
  for (const auto& args : all) vectors.push_back(vector_of(args));
  return vectors;
}

inline SectionInput section_of(const SectionArgs& args) {
  const auto& [id, vector, kept, mask, format, stochastic, seed] = args;
  return {id, vector_of(vector), {at<float>(kept), at<float>(mask)}, Format(format), {stochastic, seed, 0}};
}

inline EntriesInput entries_of(const EntriesArgs& args) {
  const auto& [id, positions, values, count, n, sent, format, stochastic, seed] = args;
  const Rounding rounding{stochastic, seed, 0};
  return {id,      at<const uint64_t>(positions), at<const float>(values), count, n, at<float>(sent), Format(format),
          rounding};
}

inline std::tuple<uint64_t, uint64_t, uint64_t, double> as_tuple(const Written& w) {
  return {w.sent, w.selected, w.ties, w.magnitudes};
}

void bind_datagrams(nb::module_& m);
void bind_pieces(nb::module_& m);
void bind_reading(nb::module_& m);
void bind_update(nb::module_& m);

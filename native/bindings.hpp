// What the files of the Python module share: how addresses and vectors are passed.
#pragma once
#include <nanobind/nanobind.h>
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

inline Source source_of(Address gradient, int dtype, Address memory, float decay) {
  return {at<const void>(gradient), Dtype(dtype), at<float>(memory), decay};
}

// (gradient, dtype, memory, decay, n): a vector as Python passes it.
using Described = std::tuple<Address, int, Address, float, size_t>;
using Plain = std::tuple<Address, int, size_t>;

inline Vector vector_of(const Described& d) {
  return {source_of(std::get<0>(d), std::get<1>(d), std::get<2>(d), std::get<3>(d)), std::get<4>(d)};
}

inline std::vector<Vector> vectors_of(const std::vector<Described>& described) {
  std::vector<Vector> vectors;
  for (const auto& d : described) vectors.push_back(vector_of(d));
  return vectors;
}

inline std::tuple<uint64_t, uint64_t, uint64_t, double> plain(const Written& w) {
  return {w.sent, w.selected, w.ties, w.magnitudes};
}

void bind_datagrams(nb::module_& m);
void bind_pieces(nb::module_& m);
void bind_reading(nb::module_& m);

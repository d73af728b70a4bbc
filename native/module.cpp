// The Python module: addresses of contiguous CPU memory in, plain numbers out; the GIL is released in every kernel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "crc32c.hpp"
#include "histogram.hpp"
#include "positions.hpp"
#include "reader.hpp"
#include "shards.hpp"
#include "statistics.hpp"
#include "sum.hpp"
#include "writer.hpp"

namespace nb = nanobind;
using namespace thinwire;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

Source source_of(Address gradient, int dtype, Address memory, float decay) {
  return {at<const void>(gradient), Dtype(dtype), at<float>(memory), decay};
}

// (gradient, dtype, memory, decay, n): a vector as Python passes it.
using Described = std::tuple<Address, int, Address, float, size_t>;

Vector vector_of(const Described& d) {
  return {source_of(std::get<0>(d), std::get<1>(d), std::get<2>(d), std::get<3>(d)), std::get<4>(d)};
}

std::vector<Vector> vectors_of(const std::vector<Described>& described) {
  std::vector<Vector> vectors;
  for (const auto& d : described) vectors.push_back(vector_of(d));
  return vectors;
}

std::tuple<uint64_t, uint64_t, uint64_t, double> plain(const Written& w) {
  return {w.sent, w.selected, w.ties, w.magnitudes};
}

void bind_statistics(nb::module_& m) {
  m.def("sampled_thresholds", [](const std::vector<Described>& described, const std::vector<double>& densities,
                                 uint64_t wanted, uint64_t seed) {
    nb::gil_scoped_release release;
    std::vector<std::tuple<float, double>> found;
    for (const auto& t : sampled_thresholds(vectors_of(described), densities, wanted, seed))
      found.emplace_back(t.value, t.above);
    return found;
  });
  m.def("histogram", [](const std::vector<Described>& described, uint64_t wanted, uint64_t seed, Address out) {
    nb::gil_scoped_release release;
    uint64_t taken = 0;
    double* row = at<double>(out);
    const std::vector<Bin> found = histogram(vectors_of(described), wanted, seed, &taken);
    for (const Bin& bin : found) {
      *row++ = bin.count;
      *row++ = bin.low;
      *row++ = bin.high;
    }
    return std::tuple(taken, found.size());
  });
  m.def("moments", [](const Described& d, uint64_t wanted, uint64_t seed) {
    nb::gil_scoped_release release;
    const Moments s = moments(vector_of(d), wanted, seed);
    return std::tuple(s.count, s.sum, s.squares, s.magnitudes);
  });
  m.def("select", [](const std::vector<Described>& described, uint64_t rank) {
    nb::gil_scoped_release release;
    const OrderStatistic s = select(vectors_of(described), rank);
    return std::tuple(s.value, s.greater, s.equal);
  });
  m.def("collect_above", [](const Described& d, float threshold, Address out, uint64_t capacity) {
    nb::gil_scoped_release release;
    return collect_above(vector_of(d), threshold, at<float>(out), capacity);
  });
  m.def("all_zero", [](Address data, int dtype, size_t n) {
    nb::gil_scoped_release release;
    return all_zero(at<const void>(data), Dtype(dtype), n);
  });
  m.def("all_finite", [](Address data, int dtype, size_t n) {
    nb::gil_scoped_release release;
    return all_finite(at<const void>(data), Dtype(dtype), n);
  });
}

void bind_memory(nb::module_& m) {
  m.def("accumulate", [](const Described& d) {
    nb::gil_scoped_release release;
    const Vector v = vector_of(d);
    accumulate(v.source, v.n);
  });
  m.def("accumulate_momentum", [](const Described& d, Address u, Address v, float momentum, bool nesterov) {
    nb::gil_scoped_release release;
    const Vector x = vector_of(d);
    accumulate_momentum(x.source.gradient, x.source.dtype, x.n, at<float>(u), at<float>(v), momentum, nesterov);
  });
}

void bind_writer(nb::module_& m) {
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.def("section_bytes", [](uint64_t id, uint64_t n, bool strata) {
    return section_header_bytes(id, n, strata ? Indexing::strata : Indexing::gaps);
  });
  m.attr("BLOCK") = kBlock;
  m.attr("BINS") = kBins;
  m.def("block_bytes", [](int format, size_t n) { return block_bytes(Format(format), n); });
  nb::class_<Writer>(m, "Writer")
      .def("__init__",
           [](Writer* self, Address buffer, size_t capacity) { new (self) Writer(at<uint8_t>(buffer), capacity); })
      .def("add_selected",
           [](Writer& w, uint32_t id, const Described& d, Address held, Address mask, float threshold, uint64_t ties,
              int format, bool stochastic, uint64_t seed, size_t reserve) {
             nb::gil_scoped_release release;
             const Vector v = vector_of(d);
             return plain(w.add_selected(id, v.source, v.n, {at<float>(held), at<float>(mask)}, {threshold, ties},
                                         Format(format), {stochastic, seed, 0}, reserve));
           })
      .def("add_strata",
           [](Writer& w, uint32_t id, const Described& d, Address held, Address mask, uint64_t count, uint64_t strata,
              int format, bool stochastic, uint64_t seed, size_t reserve) {
             nb::gil_scoped_release release;
             const Vector v = vector_of(d);
             return plain(w.add_strata(id, v.source, v.n, {at<float>(held), at<float>(mask)}, count, strata,
                                       Format(format), {stochastic, seed, 0}, reserve));
           })
      .def("add_entries",
           [](Writer& w, uint32_t id, Address positions, Address values, uint64_t count, size_t n, Address sent,
              bool is_strata, uint64_t strata, int format, bool stochastic, uint64_t seed, size_t reserve) {
             nb::gil_scoped_release release;
             return plain(w.add_entries(id, at<const uint64_t>(positions), at<const float>(values), count, n,
                                        at<float>(sent), is_strata, strata, Format(format), {stochastic, seed, 0}, reserve));
           })
      .def_static("add_dealt",
                  [](const std::vector<Writer*>& owners, const std::vector<size_t>& reserves, uint64_t first,
                     uint32_t id, const Described& d, Address held, Address mask, float threshold, uint64_t ties,
                     int format, bool stochastic, uint64_t seed) {
                    if (owners.empty() || owners.size() != reserves.size())
                      throw std::invalid_argument("every owner has a writer and a reserve");
                    nb::gil_scoped_release release;
                    const Vector v = vector_of(d);
                    return plain(Writer::add_dealt(owners, reserves, {owners.size(), first}, id, v.source, v.n,
                                                   {at<float>(held), at<float>(mask)}, {threshold, ties},
                                                   Format(format), {stochastic, seed, 0}));
                  })
      .def("finish", [](Writer& w, int flags) {
        nb::gil_scoped_release release;
        return w.finish(uint8_t(flags));
      });
}

void bind_reader(nb::module_& m) {
  nb::class_<Section>(m, "Section")
      .def_ro("id", &Section::id)
      .def_ro("numel", &Section::numel)
      .def_ro("count", &Section::count)
      .def_prop_ro("format", [](const Section& s) { return int(s.format); })
      .def_prop_ro("strata", [](const Section& s) { return s.indexing == Indexing::strata; });
  nb::class_<Reader>(m, "Reader")
      .def("__init__",
           [](Reader* self, Address frame, size_t size, const std::vector<uint64_t>& numels, bool trailing) {
             nb::gil_scoped_release release;
             new (self) Reader(at<const uint8_t>(frame), size, numels, trailing);
           })
      .def_prop_ro("sections", &Reader::sections)
      .def_prop_ro("length", &Reader::length)
      .def_prop_ro("non_finite", [](const Reader& r) { return (r.flags() & kNonFinite) != 0; })
      .def("add",
           [](const Reader& r, const Section& s, Address out, float weight) {
             if (!r.owns(s)) throw std::invalid_argument("the section belongs to another frame");
             nb::gil_scoped_release release;
             r.add(s, at<float>(out), weight);
           })
      .def("entries", [](const Reader& r, const Section& s, Address positions, Address values) {
        if (!r.owns(s)) throw std::invalid_argument("the section belongs to another frame");
        nb::gil_scoped_release release;
        r.entries(s, at<uint64_t>(positions), at<float>(values));
      });
}

// The bytes of several buffers, one after the other, and the size of each.
std::pair<std::vector<uint8_t>, std::vector<size_t>> joined(const nb::sequence& buffers) {
  std::pair<std::vector<uint8_t>, std::vector<size_t>> found;
  for (nb::handle each : buffers) {
    Py_buffer view;
    if (PyObject_GetBuffer(each.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
    const auto* bytes = static_cast<const uint8_t*>(view.buf);
    found.first.insert(found.first.end(), bytes, bytes + view.len);
    found.second.push_back(size_t(view.len));
    PyBuffer_Release(&view);
  }
  return found;
}

void bind_shards(nb::module_& m) {
  nb::class_<ShardWriter>(m, "ShardWriter")
      .def(nb::init<size_t, bool>())
      .def("add_selected",
           [](ShardWriter& w, uint32_t tensor, const Described& d, Address held, Address mask, float threshold,
              uint64_t ties, int format, bool stochastic, uint64_t seed) {
             nb::gil_scoped_release release;
             const Vector v = vector_of(d);
             return plain(w.add_selected(tensor, v.source, v.n, {at<float>(held), at<float>(mask)}, {threshold, ties},
                                         Format(format), {stochastic, seed, 0}));
           })
      .def("add_entries",
           [](ShardWriter& w, uint32_t tensor, Address positions, Address values, uint64_t count, size_t n,
              Address sent, int format, bool stochastic, uint64_t seed) {
             nb::gil_scoped_release release;
             w.add_entries(tensor, at<const uint64_t>(positions), at<const float>(values), count, n, at<float>(sent),
                           Format(format), {stochastic, seed, 0});
           })
      .def("finish", [](ShardWriter& w) {
        nb::list shards;
        for (const auto& shard : w.finish()) shards.append(nb::bytes(shard.data(), shard.size()));
        return shards;
      });
  nb::class_<ShardReader>(m, "ShardReader")
      .def("__init__",
           [](ShardReader* self, const nb::sequence& shards, const std::vector<uint64_t>& numels, bool exact) {
             auto [bytes, sizes] = joined(shards);
             nb::gil_scoped_release release;
             new (self) ShardReader(std::move(bytes), sizes, numels, exact);
           })
      .def_prop_ro("pieces",
                   [](const ShardReader& r) {
                     std::vector<std::tuple<uint32_t, uint64_t>> found;
                     for (const auto& piece : r.pieces()) found.emplace_back(piece.tensor, piece.section->count);
                     return found;
                   })
      .def("add",
           [](const ShardReader& r, const std::vector<Address>& outs, float weight) {
             nb::gil_scoped_release release;
             std::vector<float*> rows;
             for (const Address out : outs) rows.push_back(at<float>(out));
             r.add(rows, weight);
           })
      .def("entries", [](const ShardReader& r, size_t piece, Address positions, Address values) {
        nb::gil_scoped_release release;
        r.entries(r.pieces().at(piece), at<uint64_t>(positions), at<float>(values));
      });
}

void bind_sums(nb::module_& m) {
  m.attr("DEAL") = kDeal;
  m.def("share_of", [](uint64_t n, uint64_t world, uint64_t first, uint64_t owner) {
    return Deal{world, first}.share(n, owner);
  });
  // sums: (address, n, world, first) of each result.
  m.def("sum_frames", [](const std::vector<const Reader*>& frames,
                         const std::vector<std::tuple<Address, uint64_t, uint64_t, uint64_t>>& sums, float weight) {
    nb::gil_scoped_release release;
    std::vector<Sum> results;
    for (const auto& [out, n, world, first] : sums) results.push_back({at<float>(out), n, {world, first}});
    sum_frames(frames, results, weight);
  });
  m.def("add_share", [](Address whole, uint64_t n, uint64_t world, uint64_t first, uint64_t owner, Address share) {
    nb::gil_scoped_release release;
    add_share(at<float>(whole), n, {world, first}, owner, at<const float>(share));
  });
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "thinwire's kernels: selection, quantisation, frames";
  m.def("avx2", [](bool on) { use_avx2(on); });
  m.def("avx2_in_use", &avx2_in_use);
  m.def("avx2_available", &avx2_available);
  m.def("crc32c", [](Address data, size_t size) {
    nb::gil_scoped_release release;
    return crc32c(0, at<const uint8_t>(data), size);
  });
  m.def("mix", &mix);
  m.def("strata_positions", [](uint64_t seed, uint64_t count, uint64_t n, Address out) {
    nb::gil_scoped_release release;
    for (uint64_t j = 0; j < count; ++j) at<uint64_t>(out)[j] = stratum_position(seed, j, count, n);
  });
  bind_statistics(m);
  bind_memory(m);
  bind_writer(m);
  bind_reader(m);
  bind_shards(m);
  bind_sums(m);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const FrameFault& fault) {
      nb::object type = nb::module_::import_("thinwire.errors").attr("FrameError");
      PyErr_SetString(type.ptr(), fault.what());
    }
  });
}

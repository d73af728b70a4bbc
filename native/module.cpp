// The Python module: addresses of contiguous CPU memory in, plain numbers out; the GIL is released in every kernel.
#include <algorithm>

#include "bindings.hpp"
#include "crc32c.hpp"
#include "encoder.hpp"
#include "frame.hpp"
#include "histogram.hpp"
#include "positions.hpp"
#include "writer.hpp"

namespace {

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
  // The same with the search narrowed first; the last of the answer: whether the memories hold the sums now.
  m.def("order_statistic", [](const std::vector<Described>& described, uint64_t rank) {
    nb::gil_scoped_release release;
    std::vector<Vector> vectors = vectors_of(described);
    const bool open = std::any_of(vectors.begin(), vectors.end(), [](const Vector& v) { return v.source.memory; });
    const OrderStatistic s = order_statistic(vectors, rank);
    const bool still = std::any_of(vectors.begin(), vectors.end(), [](const Vector& v) { return v.source.memory; });
    return std::tuple(s.value, s.greater, s.equal, open && !still);
  });
  // Of several (address, dtype, n): which hold nothing but zeros, and the first that holds something not finite.
  m.def("all_zero", [](const std::vector<Plain>& arrays) {
    nb::gil_scoped_release release;
    std::vector<size_t> found;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto& [data, dtype, n] = arrays[i];
      if (all_zero(at<const void>(data), Dtype(dtype), n)) found.push_back(i);
    }
    return found;
  });
  m.def("first_not_finite", [](const std::vector<Plain>& arrays) {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto& [data, dtype, n] = arrays[i];
      if (!all_finite(at<const void>(data), Dtype(dtype), n)) return int64_t(i);
    }
    return int64_t(-1);
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
      .def("finish", [](Writer& w, int flags, bool pad) {
        nb::gil_scoped_release release;
        return w.finish(uint8_t(flags), pad);
      });
}

// A vector, where it is held, whether it travels whole, its format and its reserve.
using Encodable = std::tuple<Described, Address, bool, int, size_t>;

void bind_encoder(nb::module_& m) {
  nb::class_<Encoder>(m, "Encoder")
      .def("__init__",
           [](Encoder* self, const std::vector<Encodable>& given) {
             std::vector<Encoder::Tensor> tensors;
             for (const auto& [described, held, whole, format, reserve] : given)
               tensors.push_back({vector_of(described), at<float>(held), whole, Format(format), reserve});
             new (self) Encoder(std::move(tensors));
           })
      .def("encode", [](const Encoder& e, double density, uint64_t step, Address room, size_t capacity) {
        nb::gil_scoped_release release;
        Encoded found = e.encode(density, step, at<uint8_t>(room), capacity);
        return std::tuple(found.not_finite, found.length, std::move(found.sent));
      });
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a link that lives until the end of the process is no leak
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
  bind_encoder(m);
  bind_datagrams(m);
  bind_pieces(m);
  bind_reading(m);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const FrameFault& fault) {
      nb::object type = nb::module_::import_("thinwire.errors").attr("FrameError");
      PyErr_SetString(type.ptr(), fault.what());
    }
  });
}

// The Python module `thinwire._native`. Functions take addresses of contiguous CPU memory and return numbers; all
// kernels release the GIL.
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
  m.attr("BINS") = kBins;
  m.attr("BIN_SHIFT") = kBinShift;
  m.attr("SAMPLED_ABOVE") = kSampledAbove;
  m.def("entry_count", &entry_count);
  m.def("sample_size", &sample_size);
  m.def("allowed_ties", &allowed_ties);
  m.def("sampled_thresholds",
        [](const std::vector<VectorArgs>& args, const std::vector<double>& densities, uint64_t wanted, uint64_t seed) {
          nb::gil_scoped_release release;
          std::vector<std::tuple<float, double>> found;
          for (const auto& t : sampled_thresholds(vectors_of(args), densities, wanted, seed))
            found.emplace_back(t.value, t.above);
          return found;
        });
  m.def("histogram", [](const std::vector<VectorArgs>& args, uint64_t wanted, uint64_t seed, Address out) {
    nb::gil_scoped_release release;
    uint64_t taken = 0;
    double* row = at<double>(out);
    const std::vector<Bin> found = histogram(vectors_of(args), wanted, seed, &taken);
    for (const Bin& bin : found) {
      *row++ = bin.count;
      *row++ = bin.low;
      *row++ = bin.high;
    }
    return std::tuple(taken, found.size());
  });
  m.def("moments", [](const VectorArgs& args, uint64_t wanted, uint64_t seed) {
    nb::gil_scoped_release release;
    const Moments s = moments(vector_of(args), wanted, seed);
    return std::tuple(s.count, s.sum, s.squares, s.magnitudes);
  });
  m.def("select", [](const std::vector<VectorArgs>& args, uint64_t rank) {
    nb::gil_scoped_release release;
    const OrderStatistic s = select(vectors_of(args), rank);
    return std::tuple(s.value, s.greater, s.equal);
  });
  // As `select`, with a narrowed search. The last element tells whether the residuals were accumulated.
  m.def("order_statistic", [](const std::vector<VectorArgs>& args, uint64_t rank) {
    nb::gil_scoped_release release;
    std::vector<Vector> vectors = vectors_of(args);
    const auto pending = [&] {
      return std::any_of(vectors.begin(), vectors.end(), [](const Vector& v) { return v.source.residual; });
    };
    const bool before = pending();
    const OrderStatistic s = order_statistic(vectors, rank);
    return std::tuple(s.value, s.greater, s.equal, before && !pending());
  });
  // The indices of the arrays that are all zeros, and the first array with a value that is not finite.
  m.def("all_zero", [](const std::vector<ArrayArgs>& arrays) {
    nb::gil_scoped_release release;
    std::vector<size_t> found;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto& [data, dtype, n] = arrays[i];
      if (all_zero(at<const void>(data), Dtype(dtype), n)) found.push_back(i);
    }
    return found;
  });
  m.def("first_not_finite", [](const std::vector<ArrayArgs>& arrays) {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto& [data, dtype, n] = arrays[i];
      if (!all_finite(at<const void>(data), Dtype(dtype), n)) return int64_t(i);
    }
    return int64_t(-1);
  });
}

void bind_accumulation(nb::module_& m) {
  m.def("accumulate", [](const VectorArgs& args) {
    nb::gil_scoped_release release;
    const Vector v = vector_of(args);
    accumulate(v.source, 0, v.n);
  });
  m.def("accumulate_momentum", [](const VectorArgs& args, Address u, Address v, float momentum, bool nesterov) {
    nb::gil_scoped_release release;
    const Vector x = vector_of(args);
    accumulate_momentum(x.source.gradient, x.source.dtype, x.n, at<float>(u), at<float>(v), momentum, nesterov);
  });
}

void check_owners(const std::vector<Writer*>& owners, const std::vector<size_t>& reserves) {
  if (owners.empty() || owners.size() != reserves.size())
    throw std::invalid_argument("every owner needs a writer and a reserve");
}

// (section, start and count of its window, world, first)
using WindowArgs = std::tuple<SectionArgs, uint64_t, uint64_t, uint64_t, uint64_t>;

void check_owners(const std::vector<Writer*>& owners, const std::vector<WindowArgs>& windows) {
  for (const auto& [section, start, count, world, first] : windows)
    if (world == 1 ? first >= owners.size() : world != owners.size())
      throw std::invalid_argument("every owner of a window needs a writer");
}

void bind_writer(nb::module_& m) {
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("GAPS") = int(Indexing::gaps);
  m.attr("STRATA") = int(Indexing::strata);
  m.attr("WINDOW") = int(Indexing::window);
  m.def("section_bytes",
        [](uint64_t id, uint64_t n, int coding) { return section_header_bytes(id, n, Indexing(coding)); });
  m.attr("BLOCK") = kBlock;
  m.def("block_bytes", [](int format, size_t n) { return block_bytes(Format(format), n); });
  nb::class_<Writer>(m, "Writer")
      .def("__init__",
           [](Writer* self, Address buffer, size_t capacity) { new (self) Writer(at<uint8_t>(buffer), capacity); })
      .def("add_selected",
           [](Writer& w, const SectionArgs& section, float threshold, uint64_t ties, size_t reserve) {
             nb::gil_scoped_release release;
             return as_tuple(w.add_selected(section_of(section), {threshold, ties}, reserve));
           })
      .def("add_strata",
           [](Writer& w, const SectionArgs& section, uint64_t count, uint64_t seed, size_t reserve) {
             nb::gil_scoped_release release;
             return as_tuple(w.add_strata(section_of(section), count, seed, reserve));
           })
      .def("add_window",
           [](Writer& w, const SectionArgs& section, uint64_t start, uint64_t count, size_t reserve) {
             nb::gil_scoped_release release;
             return as_tuple(w.add_window(section_of(section), {start, count}, reserve));
           })
      .def("add_window_entries",
           [](Writer& w, const EntriesArgs& entries, size_t reserve) {
             nb::gil_scoped_release release;
             return w.add_window_entries(entries_of(entries), reserve);
           })
      .def(
          "add_entries",
          [](Writer& w, const EntriesArgs& entries, std::optional<uint64_t> seed, size_t reserve) {
            nb::gil_scoped_release release;
            return w.add_entries(entries_of(entries), seed, reserve);
          },
          nb::arg("entries"), nb::arg("seed").none(), nb::arg("reserve"))
      .def_static("add_parts",
                  [](const std::vector<Writer*>& owners, const std::vector<size_t>& reserves, uint64_t first,
                     const SectionArgs& section, float threshold, uint64_t ties) {
                    check_owners(owners, reserves);
                    nb::gil_scoped_release release;
                    return as_tuple(Writer::add_parts(owners, reserves, {owners.size(), first}, section_of(section),
                                                      {threshold, ties}));
                  })
      .def_static("add_window_parts",
                  [](const std::vector<Writer*>& owners, const std::vector<size_t>& reserves, uint64_t first,
                     const SectionArgs& section, uint64_t start, uint64_t count) {
                    check_owners(owners, reserves);
                    nb::gil_scoped_release release;
                    return as_tuple(Writer::add_window_parts(owners, reserves, {owners.size(), first},
                                                             section_of(section), {start, count}));
                  })
      // Windows of many tensors, of which each lies in all owners' frames or in that of one owner: for each tensor its
      // section, start and count of the window, then world and first as in `Partition`.
      .def_static("add_windows",
                  [](const std::vector<Writer*>& owners, const std::vector<WindowArgs>& windows) {
                    check_owners(owners, windows);
                    nb::gil_scoped_release release;
                    const std::vector<size_t> reserves(owners.size());
                    std::vector<uint64_t> sent;
                    for (const auto& [section, start, count, world, first] : windows) {
                      const SectionInput input = section_of(section);
                      const Window window{start, count};
                      const Partition partition{world, first};
                      sent.push_back(
                          (world == 1 ? owners[first]->add_window(input, window, 0)
                                      : Writer::add_window_parts(owners, reserves, partition, input, window))
                              .sent);
                    }
                    return sent;
                  })
      .def("finish", [](Writer& w, int flags, bool pad) {
        nb::gil_scoped_release release;
        return w.finish(uint8_t(flags), pad);
      });
}

// (section, whether it is sent whole, bytes to keep free after it)
using TensorArgs = std::tuple<SectionArgs, bool, size_t>;

void bind_encoder(nb::module_& m) {
  nb::class_<Encoder>(m, "Encoder")
      .def("__init__",
           [](Encoder* self, const std::vector<TensorArgs>& all) {
             std::vector<Encoder::Tensor> tensors;
             for (const auto& [section, whole, reserve] : all) tensors.push_back({section_of(section), whole, reserve});
             new (self) Encoder(std::move(tensors));
           })
      .def("encode", [](const Encoder& e, double density, uint64_t step, Address buffer, size_t capacity) {
        nb::gil_scoped_release release;
        Encoded found = e.encode(density, step, at<uint8_t>(buffer), capacity);
        return std::tuple(found.not_finite, found.length, std::move(found.sent));
      });
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a link may live until the end of the process
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
  bind_accumulation(m);
  bind_writer(m);
  bind_encoder(m);
  bind_datagrams(m);
  bind_pieces(m);
  bind_reading(m);
  bind_update(m);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const FrameFault& fault) {
      nb::object type = nb::module_::import_("thinwire.errors").attr("FrameError");
      PyErr_SetString(type.ptr(), fault.what());
    }
  });
}

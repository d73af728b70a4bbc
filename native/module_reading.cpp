// The part of the Python module that reads frames and shards and adds them up, and that writes shards.
#include "bindings.hpp"
#include "reading.hpp"
#include "shards.hpp"
#include "sum.hpp"

namespace {

void bind_reader(nb::module_& m) {
  nb::class_<Section>(m, "Section")
      .def_ro("id", &Section::id)
      .def_ro("numel", &Section::numel)
      .def_ro("count", &Section::count)
      .def_prop_ro("format", [](const Section& s) { return int(s.format); })
      .def_prop_ro("coding", [](const Section& s) { return int(s.indexing); });
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

// Returns the bytes of several buffers, one after the other, and the size of each.
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
           [](ShardWriter& w, const SectionArgs& section, float threshold, uint64_t ties) {
             nb::gil_scoped_release release;
             return as_tuple(w.add_selected(section_of(section), {threshold, ties}));
           })
      .def("add_entries",
           [](ShardWriter& w, const EntriesArgs& entries) {
             nb::gil_scoped_release release;
             w.add_entries(entries_of(entries));
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

// (address, number of elements, world, first) of each result
using SumArgs = std::vector<std::tuple<Address, uint64_t, uint64_t, uint64_t>>;

std::vector<Sum> sums_of(const SumArgs& results) {
  std::vector<Sum> sums;
  for (const auto& [out, n, world, first] : results) sums.push_back({at<float>(out), n, {world, first}});
  return sums;
}

// Frames that were received together; they are read in one call and added up in another. One object serves all steps.
struct Frames {
  std::vector<Reader> readers;
  size_t count = 0;  // how many of the readers hold a frame
};

void bind_frames(nb::module_& m) {
  nb::class_<Frames>(m, "Frames")
      .def(nb::init<>())
      .def("read",
           [](Frames& f, const std::vector<std::tuple<Address, size_t>>& messages,
              const std::vector<std::vector<uint64_t>>& numels, bool trailing) {
             if (numels.size() != 1 && numels.size() != messages.size())
               throw std::invalid_argument("give one list of sizes per frame, or one for all frames");
             nb::gil_scoped_release release;
             f.count = 0;
             if (f.readers.size() < messages.size()) f.readers.resize(messages.size());
             std::vector<Message> frames;
             for (const auto& [frame, size] : messages)
               frames.push_back({at<const uint8_t>(frame), size, &numels[frames.size() % numels.size()]});
             read_frames(frames, f.readers, trailing);
             f.count = messages.size();
           })
      .def_prop_ro("lengths",
                   [](const Frames& f) {
                     std::vector<size_t> found;
                     for (size_t i = 0; i < f.count; ++i) found.push_back(f.readers[i].length());
                     return found;
                   })
      .def_prop_ro("non_finite",
                   [](const Frames& f) {
                     std::vector<size_t> found;
                     for (size_t i = 0; i < f.count; ++i)
                       if (f.readers[i].flags() & kNonFinite) found.push_back(i);
                     return found;
                   })
      .def("sum", [](const Frames& f, const SumArgs& results, float weight) {
        nb::gil_scoped_release release;
        std::vector<const Reader*> frames;
        for (size_t i = 0; i < f.count; ++i) frames.push_back(&f.readers[i]);
        sum_frames(frames, sums_of(results), weight);
      });
}

void bind_sums(nb::module_& m) {
  m.attr("PARTITION_BLOCK") = kPartitionBlock;
  m.def("share_of", [](uint64_t n, uint64_t world, uint64_t first, uint64_t owner) {
    return Partition{world, first}.share(n, owner);
  });
  m.def("sum_frames", [](const std::vector<const Reader*>& frames, const SumArgs& results, float weight) {
    nb::gil_scoped_release release;
    sum_frames(frames, sums_of(results), weight);
  });
  m.def("add_share", [](Address whole, uint64_t n, uint64_t world, uint64_t first, uint64_t owner, Address share) {
    nb::gil_scoped_release release;
    add_share(at<float>(whole), n, {world, first}, owner, at<const float>(share));
  });
}

}  // namespace

void bind_reading(nb::module_& m) {
  bind_reader(m);
  bind_shards(m);
  bind_frames(m);
  bind_sums(m);
}

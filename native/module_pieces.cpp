// The part of the Python module that packs many pieces of a message into datagrams, and unpacks them, in one call.
//
// A datagram has one piece: kind, length of the head, length of the piece, index, count, message, time of sending,
// head, piece; padding may follow. In Python the packing would take longer than the encryption.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "bindings.hpp"

namespace {

static_assert(std::endian::native == std::endian::little,
              "datagrams are little-endian: this code needs a little-endian machine");

constexpr uint8_t kData = 1;

#pragma pack(push, 1)
struct Header {
  uint8_t kind, head;
  uint16_t piece, index, count;
  uint32_t message;
  double sent;
};
#pragma pack(pop)

std::string_view view(const nb::handle& bytes) {
  const nb::bytes object = nb::cast<nb::bytes>(bytes);
  return {object.c_str(), object.size()};  // the caller keeps the object alive
}

// Returns the contents of one datagram for each piece. All but the last are padded to the longest if that takes at most
// `padding` bytes: datagrams of equal length can be sent in one call.
nb::list pack_all(uint32_t message, size_t first, size_t count, const nb::bytes& head, const nb::list& pieces,
                  double now, size_t padding) {
  size_t longest = 0;
  for (const auto& piece : pieces) longest = std::max(longest, view(piece).size());
  if (first + pieces.size() > count || count > UINT16_MAX || longest > UINT16_MAX || head.size() > UINT8_MAX)
    throw std::invalid_argument("a piece, or its head, is too long for a datagram");
  nb::list found;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::string_view piece = view(pieces[i]);
    const bool padded = i + 1 < pieces.size() && piece.size() + padding >= longest;
    const size_t room = padded ? longest : piece.size();
    const Header header{
        kData, uint8_t(head.size()), uint16_t(piece.size()), uint16_t(first + i), uint16_t(count), message, now};
    PyObject* made = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(sizeof header + head.size() + room));
    if (made == nullptr) throw nb::python_error();
    char* to = PyBytes_AsString(made);
    std::memcpy(to, &header, sizeof header);
    std::memcpy(to += sizeof header, head.c_str(), head.size());
    std::memcpy(to += head.size(), piece.data(), piece.size());
    std::memset(to + piece.size(), 0, room - piece.size());
    found.append(nb::steal(made));
  }
  return found;
}

// Consecutive pieces of one message that arrived within one interval of time.
struct Group {
  uint32_t message;
  uint16_t count;
  std::string_view head;
  nb::dict pieces;
  size_t repeated = 0;
  double flight, first, last;

  nb::tuple as_tuple() const {
    return nb::make_tuple(message, count, nb::bytes(head.data(), head.size()), pieces, repeated, flight, first, last);
  }
};

// Unpacks the contents of datagrams, with their times of arrival, into groups. Returns these and the number of
// malformed datagrams.
nb::tuple read_all(const nb::list& plains, const std::vector<double>& stamps, double span) {
  if (stamps.size() != plains.size()) throw std::invalid_argument("every datagram needs a time of arrival");
  nb::list groups;
  std::optional<Group> group;
  size_t broken = 0;
  for (size_t i = 0; i < plains.size(); ++i) {
    const std::string_view plain = view(plains[i]);
    Header h{};
    if (plain.size() >= sizeof h) std::memcpy(&h, plain.data(), sizeof h);
    if (plain.size() < sizeof h + h.head + h.piece || h.index >= h.count || !(std::abs(h.sent) < 1e12)) {
      ++broken;
      continue;
    }
    const std::string_view head = plain.substr(sizeof h, h.head), piece = plain.substr(sizeof h + h.head, h.piece);
    const double stamp = stamps[i], flight = stamp - h.sent;
    const bool joins = group && group->message == h.message && group->count == h.count && group->head == head &&
                       std::floor(group->last / span) == std::floor(stamp / span);
    if (!joins) {
      if (group) groups.append(group->as_tuple());
      group.emplace(Group{h.message, h.count, head, nb::dict(), 0, flight, stamp, stamp});
    }
    const nb::int_ index(h.index);
    if (group->pieces.contains(index)) {
      ++group->repeated;
      continue;
    }
    group->pieces[index] = nb::bytes(piece.data(), piece.size());
    group->flight = std::min(group->flight, flight);
    group->last = stamp;
  }
  if (group) groups.append(group->as_tuple());
  return nb::make_tuple(groups, broken);
}

// Returns for each datagram, numbered from `counter` on, what the cipher takes: nonce, contents, header in clear text.
nb::list label(const nb::list& plains, const nb::bytes& prefix, uint32_t session, uint64_t counter) {
  nb::list found;
  char nonce[12] = {};
  std::vector<char> clear(prefix.size() + sizeof session + sizeof counter);
  std::memcpy(clear.data(), prefix.c_str(), prefix.size());
  std::memcpy(clear.data() + prefix.size(), &session, sizeof session);
  for (const auto& plain : plains) {
    std::memcpy(nonce, &counter, sizeof counter);
    std::memcpy(clear.data() + prefix.size() + sizeof session, &counter, sizeof counter);
    ++counter;
    found.append(nb::make_tuple(nb::bytes(nonce, sizeof nonce), plain, nb::bytes(clear.data(), clear.size())));
  }
  return found;
}

}  // namespace

void bind_pieces(nb::module_& m) {
  m.def("pack_data", &pack_all);
  m.def("read_data", &read_all);
  m.def("label_datagrams", &label);
  m.attr("DATA") = kData;
  m.attr("DATA_BYTES") = sizeof(Header);
}

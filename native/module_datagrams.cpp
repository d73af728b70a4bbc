// The part of the Python module that receives many datagrams from a socket in one call. Their contents are not
// authenticated yet.
//
// In Python the handling of buffers, headers and times of arrival would take longer than that of the contents.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <vector>

#include "bindings.hpp"

namespace {

constexpr size_t kSession = 4, kCounter = 8, kNonce = 12;

uint64_t little(const char* from, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint64_t(uint8_t(from[i])) << (8 * i);
  return value;
}

bool ours(std::string_view datagram, std::string_view prefix, size_t least) {
  const size_t clear = prefix.size() + kSession + kCounter;
  return datagram.size() >= std::max(least, clear) && datagram.substr(0, prefix.size()) == prefix;
}

// Returns (session, counter, nonce, header in clear text, encrypted contents). The nonce is the counter, padded with
// zeros.
nb::tuple split(std::string_view datagram, std::string_view prefix) {
  const char* session = datagram.data() + prefix.size();
  const size_t clear = prefix.size() + kSession + kCounter;
  char nonce[kNonce] = {};
  std::memcpy(nonce, session + kSession, kCounter);
  return nb::make_tuple(little(session, kSession), little(session + kSession, kCounter), nb::bytes(nonce, kNonce),
                        nb::bytes(datagram.data(), clear), nb::bytes(datagram.data() + clear, datagram.size() - clear));
}

// Returns the operating system's time of arrival if the socket provides it, else the current time.
double stamp_of([[maybe_unused]] msghdr& message) {
  timespec when;
  clock_gettime(CLOCK_REALTIME, &when);
#ifdef SCM_TIMESTAMPNS
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c))
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS && c->cmsg_len >= CMSG_LEN(sizeof when))
      std::memcpy(&when, CMSG_DATA(c), sizeof when);
#endif
  return double(when.tv_sec) + 1e-9 * double(when.tv_nsec);
}

#ifdef __linux__
using Row = mmsghdr;

int receive_rows(int socket, Row* rows, unsigned wanted) {
  return recvmmsg(socket, rows, wanted, MSG_DONTWAIT, nullptr);
}
#else
struct Row {
  msghdr msg_hdr;
  unsigned msg_len;
};

// Without recvmmsg there is one call per datagram.
int receive_rows(int socket, Row* rows, unsigned wanted) {
  for (unsigned i = 0; i < wanted; ++i) {
    const ssize_t size = recvmsg(socket, &rows[i].msg_hdr, MSG_DONTWAIT);
    if (size < 0) return i ? int(i) : -1;
    rows[i].msg_len = unsigned(size);
  }
  return int(wanted);
}
#endif

// Buffers for the datagrams of one call. Each thread has its own.
struct Rows {
  static constexpr size_t kCount = 32;
  std::vector<char> buffers;
  sockaddr_storage from[kCount];
  alignas(cmsghdr) char control[kCount][64];
  iovec into[kCount];
  Row messages[kCount];

  void prepare(size_t count, size_t largest) {
    if (buffers.size() < kCount * largest) buffers.resize(kCount * largest);
    for (size_t i = 0; i < count; ++i) {
      into[i] = {buffers.data() + i * largest, largest};
      msghdr& header = messages[i].msg_hdr;
      header = {};
      header.msg_name = &from[i], header.msg_namelen = sizeof from[i];
      header.msg_iov = &into[i], header.msg_iovlen = 1;
      header.msg_control = control[i], header.msg_controllen = sizeof control[i];
    }
  }
};

// Receives up to `most` datagrams. Returns (the result of `split`, the sender's address, the time of arrival) for each,
// how many datagrams were too short, and how many had another prefix.
nb::tuple receive(int socket, size_t most, size_t largest, const nb::bytes& prefix, size_t least) {
  const std::string_view begins(prefix.c_str(), prefix.size());
  thread_local Rows rows;
  nb::list found;
  size_t truncated = 0, foreign = 0;
  for (size_t read = 0; read < most;) {
    const size_t wanted = std::min(Rows::kCount, most - read);
    rows.prepare(wanted, largest);
    const int count = receive_rows(socket, rows.messages, unsigned(wanted));
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EBADF)) break;
    read += size_t(std::max(count, 1));
    if (count < 0) continue;  // an ICMP error: a port that was sent to is closed
    for (size_t i = 0; i < size_t(count); ++i) {
      const std::string_view datagram(static_cast<char*>(rows.into[i].iov_base), rows.messages[i].msg_len);
      if (!ours(datagram, begins, least)) {
        ++(datagram.size() < least ? truncated : foreign);
        continue;
      }
      msghdr& header = rows.messages[i].msg_hdr;
      nb::bytes origin(reinterpret_cast<const char*>(&rows.from[i]), header.msg_namelen);
      found.append(nb::make_tuple(split(datagram, begins), origin, stamp_of(header)));
    }
    if (size_t(count) < wanted) break;
  }
  return nb::make_tuple(found, truncated, foreign);
}

// Returns a sender's address as Python's sockets take it; None if it is neither IPv4 nor IPv6.
nb::object address_of(const nb::bytes& origin) {
  sockaddr_storage from{};
  std::memcpy(&from, origin.c_str(), std::min(origin.size(), sizeof from));
  char host[INET6_ADDRSTRLEN] = {};
  if (from.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(from);
    inet_ntop(AF_INET, &a.sin_addr, host, sizeof host);
    return nb::make_tuple(nb::str(host), ntohs(a.sin_port));
  }
  if (from.ss_family == AF_INET6) {
    const auto& a = reinterpret_cast<const sockaddr_in6&>(from);
    inet_ntop(AF_INET6, &a.sin6_addr, host, sizeof host);
    return nb::make_tuple(nb::str(host), ntohs(a.sin6_port), ntohl(a.sin6_flowinfo), a.sin6_scope_id);
  }
  return nb::none();
}

}  // namespace

void bind_datagrams(nb::module_& m) {
  m.def("receive_datagrams", &receive);
  m.def("address_of", &address_of);
  m.def("split_datagram", [](const nb::bytes& datagram, const nb::bytes& prefix, size_t least) -> nb::object {
    const std::string_view bytes(datagram.c_str(), datagram.size()), begins(prefix.c_str(), prefix.size());
    return ours(bytes, begins, least) ? nb::object(split(bytes, begins)) : nb::none();
  });
}

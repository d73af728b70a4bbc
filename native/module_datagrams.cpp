// The part of the Python module that reads datagrams from a socket, many by one call. Nothing in them is believed here.
//
// In Python a datagram's buffers, headers and time of arrival take longer than its contents.
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

// (session, counter, nonce, what is in the clear, what is sealed); the nonce is the counter, filled up with zeros.
nb::tuple split(std::string_view datagram, std::string_view prefix) {
  const char* session = datagram.data() + prefix.size();
  const size_t clear = prefix.size() + kSession + kCounter;
  char nonce[kNonce] = {};
  std::memcpy(nonce, session + kSession, kCounter);
  return nb::make_tuple(little(session, kSession), little(session + kSession, kCounter), nb::bytes(nonce, kNonce),
                        nb::bytes(datagram.data(), clear),
                        nb::bytes(datagram.data() + clear, datagram.size() - clear));
}

// The kernel's own time of arrival, where the socket was asked for it, or the present.
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

// Up to `most` datagrams, as (what `split` makes, who sent it, when it came); and how many were too short, and foreign.
nb::tuple receive(int socket, size_t most, size_t largest, const nb::bytes& prefix, size_t least) {
  const std::string_view begins(prefix.c_str(), prefix.size());
  std::vector<char> buffer(largest);
  nb::list found;
  size_t truncated = 0, foreign = 0;
  for (size_t i = 0; i < most; ++i) {
    sockaddr_storage from;
    alignas(cmsghdr) char control[64];
    iovec into{buffer.data(), buffer.size()};
    msghdr message{};
    message.msg_name = &from, message.msg_namelen = sizeof from;
    message.msg_iov = &into, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    const ssize_t size = recvmsg(socket, &message, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EBADF)) break;
    if (size < 0) continue;  // somebody answered that a port is closed
    const std::string_view datagram(buffer.data(), size_t(size));
    if (!ours(datagram, begins, least)) {
      ++(datagram.size() < least ? truncated : foreign);
      continue;
    }
    nb::bytes origin(reinterpret_cast<const char*>(&from), message.msg_namelen);
    found.append(nb::make_tuple(split(datagram, begins), origin, stamp_of(message)));
  }
  return nb::make_tuple(found, truncated, foreign);
}

// A sender's address as Python's sockets take it; None for a family that is neither.
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

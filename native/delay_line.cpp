// The delay line of a lab: a program that holds every packet between two emulated hosts for the delay of their path.
//
// The ports of the lab's switch do not forward to each other. The kernel writes every packet that a host sends into a
// ring in memory that it shares with this program (AF_PACKET), together with the time of arrival. When a packet is due,
// the program writes it to a TAP device, which is one more port of the switch. It does not matter how late the program
// reads a packet, as long as the packet is not due yet. A header of virtio precedes each packet. It says whether the
// sender left the checksum unfinished, as it may on a device without a wire, and the switch gets the same header back.
//
//     delay_line CONTROL TAP PORT SWITCH HOSTS
//
// CONTROL and TAP are file descriptors: a socket that keeps messages apart, and the device. PORT and SWITCH are the
// numbers of the device and of the switch, HOSTS is the number of hosts. Each request gets one answer in JSON. The
// program ends when the socket is closed.
//
//     host NUMBER DEVICE HARDWARE DELAY ROOM    registers a host or changes it: nanoseconds, bytes that may wait
//     figures                                   all counters since the start
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Nanoseconds = int64_t;

constexpr Nanoseconds kMicrosecond = 1000;
// After work the program sleeps for 2 % of the shortest delay, within these limits, so that packets leave together.
// A sleep takes about as much processor time as two packets.
constexpr Nanoseconds kShortestPause = 50 * kMicrosecond, kLongestPause = 500 * kMicrosecond;
constexpr int kPausesOfDelay = 50;
// A program with real-time priority must never keep a core to itself: it sleeps at least a third of the time it works.
constexpr int kShareOfSleep = 3;
constexpr uint32_t kHeader = 10;      // bytes of virtio_net_hdr, whose header file C++ does not accept
constexpr size_t kMostPerTurn = 512;  // packets that are read, and that are sent, before the next sleep
constexpr size_t kFrame = 2048, kBlock = 1 << 16, kBlocks = 128;  // a ring of 4,096 packets, 8 MB
constexpr rlim_t kLongestTurn = 200'000;                          // microseconds of real-time work without a sleep

Nanoseconds read_clock(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return Nanoseconds(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

[[noreturn]] void fail(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

// The lateness of all packets in bins of nearly constant relative width: eight for each power of two microseconds.
class Histogram {
 public:
  static constexpr size_t kBins = 8 * 25;

  void add(Nanoseconds late) {
    ++bins_[bin(uint64_t(std::max<Nanoseconds>(late, 0) / kMicrosecond))];
  }

  // Writes the upper limit of each bin in microseconds and its count, without the empty bins.
  std::string json() const {
    std::string text;
    for (size_t i = 0; i < kBins; ++i)
      if (bins_[i])
        text += (text.empty() ? "[" : ", [") + std::to_string(lower(i + 1)) + ", " + std::to_string(bins_[i]) + "]";
    return "[" + text + "]";
  }

 private:
  static size_t bin(uint64_t value) {
    if (value < 8) return size_t(value);
    const int octave = std::bit_width(value) - 4;  // 8 to 15 is octave 0
    return std::min(kBins - 1, size_t(8 + 8 * octave) + size_t((value >> octave) - 8));
  }
  static uint64_t lower(size_t bin) {
    if (bin < 8) return bin;
    return (8 + bin % 8) << (bin / 8 - 1);
  }

  std::array<uint64_t, kBins> bins_{};
};

// The kernel's ring of packets that arrive at any device of this network namespace, except for two.
class PacketRing {
 public:
  PacketRing(unsigned port, unsigned bridge) : socket_(socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    if (socket_ < 0) fail("no packet socket");
    // What leaves this program arrives at its port of the switch. It must not be read again.
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, uint32_t(SKF_AD_OFF + SKF_AD_IFINDEX)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, port, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, bridge, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, 0xffff),
        BPF_STMT(BPF_RET | BPF_K, 0),
    };
    const sock_fprog filter{unsigned(std::size(code)), code};
    const int version = TPACKET_V2, yes = 1;
    const tpacket_req request{kBlock, kBlocks, kFrame, unsigned(kBlock / kFrame * kBlocks)};
    sockaddr_ll all{};
    all.sll_family = AF_PACKET, all.sll_protocol = htons(ETH_P_ALL);
    if (setsockopt(socket_, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) < 0 ||
        setsockopt(socket_, SOL_PACKET, PACKET_VERSION, &version, sizeof version) < 0 ||
        setsockopt(socket_, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes) < 0 ||
        setsockopt(socket_, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes) < 0 ||
        setsockopt(socket_, SOL_PACKET, PACKET_RX_RING, &request, sizeof request) < 0)
      fail("no ring of packets");
    void* memory = mmap(nullptr, kBlock * kBlocks, PROT_READ | PROT_WRITE, MAP_SHARED, socket_, 0);
    if (memory == MAP_FAILED) fail("no memory for the ring of packets");
    memory_ = static_cast<char*>(memory);
    if (bind(socket_, reinterpret_cast<sockaddr*>(&all), sizeof all) < 0) fail("no packets");
  }

  int descriptor() const { return socket_; }

  // Returns the next packet, or nothing. It stays valid until `release`.
  tpacket2_hdr* next() const {
    auto* header = reinterpret_cast<tpacket2_hdr*>(memory_ + at_ * kFrame);
    return __atomic_load_n(&header->tp_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER ? header : nullptr;
  }
  void release(tpacket2_hdr* header) {
    __atomic_store_n(&header->tp_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
    at_ = at_ + 1 == kBlock / kFrame * kBlocks ? 0 : at_ + 1;
  }

  // Packets that found the ring full, since the start. The kernel's own counter starts again whenever it is read.
  uint64_t overrun() {
    tpacket_stats fresh{};
    socklen_t size = sizeof fresh;
    if (getsockopt(socket_, SOL_PACKET, PACKET_STATISTICS, &fresh, &size) == 0) overrun_ += fresh.tp_drops;
    return overrun_;
  }

 private:
  int socket_;
  char* memory_ = nullptr;
  size_t at_ = 0;
  uint64_t overrun_ = 0;
};

struct Host {
  Nanoseconds delay = 0;
  size_t room = 0, waiting = 0;  // bytes that may be, and that are in flight
  uint64_t packets = 0, bytes = 0, dropped = 0;
};

struct Packet {
  Nanoseconds due;
  uint64_t number;  // packets that are due at the same time leave in the order of their arrival
  uint32_t length;
  uint32_t from;
  std::unique_ptr<char[]> data;

  bool operator<(const Packet& other) const {  // the first packet to leave is at the top of the heap
    return due != other.due ? due > other.due : number > other.number;
  }
};

// How the kernel schedules this program.
const char* volatile scheduling = "normal priority";

// The program worked too long without a sleep: give the real-time priority up, for ever.
void demote(int) {
  const sched_param none{};
  sched_setscheduler(0, SCHED_OTHER, &none);
  scheduling = "normal priority, after too long a turn with SCHED_FIFO";
}

// Asks for the best scheduling that this process may have.
void hurry() {
  prctl(PR_SET_TIMERSLACK, 1UL);
  signal(SIGXCPU, demote);
  const rlimit limit{kLongestTurn, RLIM_INFINITY};
  const sched_param lowest{1};
  if (setrlimit(RLIMIT_RTTIME, &limit) == 0 && sched_setscheduler(0, SCHED_FIFO, &lowest) == 0)
    scheduling = "SCHED_FIFO";
  else if (setpriority(PRIO_PROCESS, 0, -20) == 0)
    scheduling = "nice -20";
}

class DelayLine {
 public:
  DelayLine(int control, int tap, unsigned port, unsigned bridge, size_t hosts)
      : control_(control), tap_(tap), ring_(port, bridge), hosts_(hosts), last_(hosts * hosts) {
    started_ = scanned_ = read_clock(CLOCK_MONOTONIC);
  }

  void run() {
    for (bool open = true; open;) {
      const Nanoseconds began = read_clock(CLOCK_MONOTONIC);
      const size_t worked = take() + send_due();
      open = wait(began, worked > 0);
    }
  }

 private:
  // Moves packets from the ring into the heap and returns how many there were.
  size_t take() {
    // The kernel stamps packets with the other clock. Reading that first can only make a packet late, never early.
    const Nanoseconds real = read_clock(CLOCK_REALTIME);
    Nanoseconds now = read_clock(CLOCK_MONOTONIC);
    const Nanoseconds ahead = real - now;
    size_t count = 0;
    for (tpacket2_hdr* header; count < kMostPerTurn && (header = ring_.next()) != nullptr; ++count) {
      const Nanoseconds stamp = Nanoseconds(header->tp_sec) * 1'000'000'000 + header->tp_nsec - ahead;
      if (stamp > now) now = read_clock(CLOCK_MONOTONIC);  // it has arrived since
      // The clock may have been set in between. Then the arrival is only known to lie between two readings.
      keep(*header, scanned_ = std::clamp(stamp, scanned_, std::max(scanned_, now)));
      ring_.release(header);
    }
    if (count < kMostPerTurn) scanned_ = std::max(scanned_, now);
    return count;
  }

  void keep(const tpacket2_hdr& header, Nanoseconds arrival) {
    const char* start = reinterpret_cast<const char*>(&header);
    const auto& from = *reinterpret_cast<const sockaddr_ll*>(start + TPACKET_ALIGN(sizeof(tpacket2_hdr)));
    const char* data = start + header.tp_mac - kHeader;
    const uint32_t length = header.tp_len + kHeader;
    const auto found = devices_.find(from.sll_ifindex);
    if (found == devices_.end() || header.tp_snaplen < ETH_HLEN) return;
    Host& host = hosts_[found->second];
    if (header.tp_snaplen < header.tp_len || host.waiting + header.tp_len > host.room) {
      ++host.dropped;
      return;
    }
    const auto target = hardware_.find(std::string(data + kHeader, ETH_ALEN));
    const size_t to = target == hardware_.end() ? found->second : target->second;
    Nanoseconds& last = last_[found->second * hosts_.size() + to];
    // A packet never overtakes an earlier one of its path, even if the delay becomes shorter in between.
    last = std::max(last, arrival + std::max(host.delay, hosts_[to].delay));
    Packet packet{last, number_++, length, uint32_t(found->second), std::make_unique_for_overwrite<char[]>(length)};
    std::memcpy(packet.data.get(), data, length);
    host.waiting += header.tp_len;
    heap_.push_back(std::move(packet));
    std::push_heap(heap_.begin(), heap_.end());
  }

  // Sends the packets that are due and returns how many there were.
  size_t send_due() {
    size_t count = 0;
    for (Nanoseconds now = 0; count < kMostPerTurn && !heap_.empty(); ++count) {
      const Nanoseconds due = heap_.front().due;
      if (due > now && due > (now = read_clock(CLOCK_MONOTONIC))) break;
      std::pop_heap(heap_.begin(), heap_.end());
      const Packet packet = std::move(heap_.back());
      heap_.pop_back();
      Host& host = hosts_[packet.from];
      host.waiting -= packet.length - kHeader;
      if (write(tap_, packet.data.get(), packet.length) < 0) {
        ++host.dropped;  // the kernel has no memory for it, or the port is turned off
        continue;
      }
      ++host.packets, host.bytes += packet.length - kHeader;
      late_.add(read_clock(CLOCK_MONOTONIC) - due);
    }
    return count;
  }

  // Sleeps until a packet is due or has arrived, and answers requests. Returns whether the owner is still there.
  bool wait(Nanoseconds began, bool worked) {
    const Nanoseconds now = read_clock(CLOCK_MONOTONIC);
    Nanoseconds sleep = heap_.empty() ? -1 : std::max<Nanoseconds>(heap_.front().due - now, 0);
    if (worked) sleep = std::max(pause_, (now - began) / kShareOfSleep);
    const timespec timeout{sleep / 1'000'000'000, sleep % 1'000'000'000};
    pollfd descriptors[] = {{control_, POLLIN, 0}, {ring_.descriptor(), POLLIN, 0}};
    const nfds_t watched = worked ? 1 : 2;  // after work the program sleeps, whatever arrives
    if (ppoll(descriptors, watched, sleep < 0 ? nullptr : &timeout, nullptr) < 0 && errno != EINTR) fail("no sleep");
    return descriptors[0].revents == 0 || answer();
  }

  bool answer() {
    char text[256];
    const ssize_t size = recv(control_, text, sizeof text - 1, MSG_DONTWAIT);
    if (size <= 0) return size < 0 && (errno == EAGAIN || errno == EINTR);
    text[size] = 0;
    const std::string reply = std::strcmp(text, "figures") == 0 ? figures() : change(text);
    return send(control_, reply.data(), reply.size(), MSG_NOSIGNAL) >= 0;
  }

  std::string change(const char* text) {
    size_t number, room;
    int device;
    long long delay;
    unsigned char mac[ETH_ALEN];
    if (std::sscanf(text, "host %zu %d %2hhx:%2hhx:%2hhx:%2hhx:%2hhx:%2hhx %lld %zu", &number, &device, &mac[0],
                    &mac[1], &mac[2], &mac[3], &mac[4], &mac[5], &delay, &room) != 10 ||
        number >= hosts_.size() || delay < 0)
      return "{\"failed\": \"the delay line does not understand a request\"}";
    Host& host = hosts_[number];
    host.delay = delay, host.room = room;
    devices_[device] = number;
    hardware_[std::string(reinterpret_cast<char*>(mac), ETH_ALEN)] = number;
    const auto shorter = [](const Host& a, const Host& b) { return a.delay < b.delay; };
    const Nanoseconds shortest = std::min_element(hosts_.begin(), hosts_.end(), shorter)->delay;
    pause_ = std::clamp(shortest / kPausesOfDelay, kShortestPause, kLongestPause);
    return "{}";
  }

  std::string figures() {
    uint64_t packets = 0, bytes = 0, dropped = ring_.overrun();
    for (const Host& host : hosts_) packets += host.packets, bytes += host.bytes, dropped += host.dropped;
    std::string text = "{";
    const auto add = [&](const char* name, uint64_t value) {
      text += std::string(text.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(value);
    };
    add("packets", packets), add("bytes", bytes), add("dropped", dropped);
    add("cpu_ns", uint64_t(read_clock(CLOCK_PROCESS_CPUTIME_ID)));
    add("wall_ns", uint64_t(read_clock(CLOCK_MONOTONIC) - started_));
    return text + ", \"late\": " + late_.json() + ", \"scheduling\": \"" + scheduling + "\"}";
  }

  int control_, tap_;
  PacketRing ring_;
  std::vector<Host> hosts_;
  std::vector<Nanoseconds> last_;  // when the last packet from one host to another is due
  std::unordered_map<int, size_t> devices_;
  std::unordered_map<std::string, size_t> hardware_;
  std::vector<Packet> heap_;
  Histogram late_;
  Nanoseconds started_, scanned_, pause_ = kShortestPause;
  uint64_t number_ = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count != 6) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int numbers[5];
  for (int i = 0; i < 5; ++i) numbers[i] = std::atoi(words[i + 1]);
  try {
    DelayLine line(numbers[0], numbers[1], unsigned(numbers[2]), unsigned(numbers[3]), size_t(numbers[4]));
    hurry();
    line.run();
    return 0;
  } catch (const std::exception& error) {
    const std::string text = std::string("{\"failed\": \"") + error.what() + "\"}";
    send(numbers[0], text.data(), text.size(), MSG_NOSIGNAL);
    return 1;
  }
}

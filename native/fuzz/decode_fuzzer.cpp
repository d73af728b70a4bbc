// Coverage-guided fuzzing of the frame reader: any bytes are either refused or read within bounds.
#include <cmath>
#include <cstdlib>

#include "../crc32c.hpp"
#include "../reader.hpp"

namespace {

using namespace thinwire;

// Sizes that a receiver may expect; the golden frames use the first ones, the last has positions of 64 bits.
const std::vector<std::vector<uint64_t>> kReceivers = {
    {3000, 21}, {3000}, {700, 1300, 1000000, 0}, {2}, {0}, {1, 1, 1}, {uint64_t(1) << 33, 5000},
};
constexpr uint64_t kMostOut = 2000000;  // larger tensors are read as entries only

void require(bool holds) {
  if (!holds) std::abort();
}

void read_all(const Reader& reader) {
  for (const Section& s : reader.sections()) {
    std::vector<uint64_t> positions(s.count);
    std::vector<float> values(s.count);
    reader.entries(s, positions.data(), values.data());
    for (uint64_t i = 0; i < s.count; ++i) {
      require(positions[i] < s.numel && (i == 0 || positions[i] > positions[i - 1]));
      require(std::isfinite(values[i]));
    }
    if (s.numel > kMostOut) continue;
    std::vector<float> out(s.numel);
    reader.add(s, out.data(), 1.0f);
    for (uint64_t i = 0; i < s.count; ++i) require(out[positions[i]] == values[i]);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  std::vector<uint8_t> frame(data + 1, data + size);
  // The checksum would stop every mutation: most inputs get a header that passes, some are read as they are.
  if ((choice & 7) && frame.size() >= kHeaderBytes) {
    const uint64_t length = frame.size();
    std::memcpy(frame.data() + kAtLength, &length, 8);
    const uint32_t crc = frame_crc(frame.data(), frame.size());
    std::memcpy(frame.data() + kAtCrc, &crc, 4);
  }
  const auto& numels = kReceivers[(choice >> 3) % kReceivers.size()];
  try {
    read_all(Reader(frame.data(), frame.size(), numels, (choice & 7) == 1));
  } catch (const FrameFault&) {
  }
  return 0;
}

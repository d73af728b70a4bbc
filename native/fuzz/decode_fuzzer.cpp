// Coverage-guided fuzzing of the readers. Any bytes are either refused or read within bounds; the sum of frames, frames
// read in turns and the reader of shards give the same entries.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "../crc32c.hpp"
#include "../reading.hpp"
#include "../shards.hpp"
#include "../sum.hpp"

namespace {

using namespace thinwire;

// Sizes that a receiver may expect; the golden frames use the first ones, the last has positions of 64 bits.
const std::vector<std::vector<uint64_t>> kReceivers = {
    {3000, 21}, {3000}, {700, 1300, 1000000, 0}, {2}, {2049}, {0}, {1, 1, 1}, {uint64_t(1) << 33, 5000},
};
constexpr uint64_t kMostOut = 2000000;  // larger tensors are read as entries only

void require(bool holds) {
  if (!holds) std::abort();
}

// Sets the correct length and checksum. Otherwise almost every mutation would be refused because of them.
void repair(std::vector<uint8_t>& frame) {
  if (frame.size() < kHeaderBytes) return;
  const uint64_t length = frame.size();
  std::memcpy(frame.data() + kAtLength, &length, 8);
  const uint32_t crc = frame_crc(frame.data(), frame.size());
  std::memcpy(frame.data() + kAtCrc, &crc, 4);
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

using Entries = std::vector<std::pair<uint64_t, float>>;

Entries entries_of(const Reader& reader) {
  Entries found;
  for (const Section& s : reader.sections()) {
    std::vector<uint64_t> positions(s.count);
    std::vector<float> values(s.count);
    reader.entries(s, positions.data(), values.data());
    for (uint64_t i = 0; i < s.count; ++i) found.emplace_back(positions[i], values[i]);
  }
  return found;
}

// Reads two frames in turns. The entries, or the error of the first bad frame, are the same as for each frame alone.
void read_together(const std::vector<uint8_t>& one, const std::vector<uint8_t>& other,
                   const std::vector<uint64_t>& numels, bool trailing) {
  const std::vector<Message> messages = {{one.data(), one.size(), &numels}, {other.data(), other.size(), &numels}};
  std::vector<Entries> alone;
  std::string expected, fault;
  try {
    for (const Message& m : messages) alone.push_back(entries_of(Reader(m.frame, m.size, numels, trailing)));
  } catch (const FrameFault& error) {
    expected = error.what();
  }
  std::vector<Reader> readers(messages.size());
  try {
    read_frames(messages, readers, trailing);
    for (size_t i = 0; i < readers.size(); ++i) require(expected.empty() && entries_of(readers[i]) == alone[i]);
  } catch (const FrameFault& error) {
    fault = error.what();
  }
  require(fault == expected);
}

uint64_t largest(const std::vector<uint64_t>& numels) {
  return numels.empty() ? 0 : *std::max_element(numels.begin(), numels.end());
}

using Outs = std::vector<std::vector<float>>;

Outs room(const std::vector<uint64_t>& numels) {
  Outs outs;
  for (const uint64_t n : numels) outs.emplace_back(n);
  return outs;
}

// Returns what a reader adds to zeros.
Outs added(const Reader& reader, const std::vector<uint64_t>& numels) {
  Outs outs = room(numels);
  for (const Section& s : reader.sections()) reader.add(s, outs[s.id].data(), 1.0f);
  return outs;
}

void sum_one(const Reader& reader, const std::vector<uint64_t>& numels) {
  Outs outs = room(numels);
  std::vector<Sum> sums;
  for (size_t i = 0; i < numels.size(); ++i) sums.push_back({outs[i].data(), numels[i], Partition{}});
  sum_frames({&reader}, sums, 1.0f);
  require(outs == added(reader, numels));
}

// Reads the frame as a shard that begins some elements into its first tensor.
void read_shard(const std::vector<uint8_t>& frame, std::vector<uint64_t> numels, bool exact, const Outs& expected) {
  constexpr uint32_t kBegin = 7;
  const uint32_t place[2] = {exact ? kExact : 0, kBegin};
  std::vector<uint8_t> bytes(kShardBytes);
  std::memcpy(bytes.data(), place, kShardBytes);
  bytes.insert(bytes.end(), frame.begin(), frame.end());
  numels[0] += kBegin;
  const size_t size = bytes.size();
  const ShardReader shards(std::move(bytes), {size}, numels, exact);
  Outs outs = room(numels);
  std::vector<float*> places;
  for (auto& out : outs) places.push_back(out.data());
  shards.add(places, 1.0f);
  outs[0].erase(outs[0].begin(), outs[0].begin() + kBegin);
  require(outs == expected);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  std::vector<uint8_t> frame(data + 1, data + size);
  if (choice & 7) repair(frame);  // some are read as they are
  const auto& numels = kReceivers[(choice >> 3) % kReceivers.size()];
  const bool trailing = (choice & 7) == 1;
  std::vector<uint8_t> beginning(frame.begin(), frame.begin() + ptrdiff_t(frame.size() / 2));
  repair(beginning);
  read_together(frame, frame, numels, trailing);
  read_together(beginning, frame, numels, trailing);
  try {
    const Reader reader(frame.data(), frame.size(), numels, trailing);
    read_all(reader);
    if (reader.length() < frame.size() || (reader.flags() & kNonFinite) || largest(numels) > kMostOut) return 0;
    sum_one(reader, numels);
    read_shard(frame, numels, choice & 1, added(reader, numels));
  } catch (const FrameFault&) {
  }
  return 0;
}

// The reader of shards. Each shard is checked as a frame of the part of the batch that begins with its first element.
#include <algorithm>

#include "shards.hpp"

namespace thinwire {

ShardReader::ShardReader(std::vector<uint8_t> bytes, const std::vector<size_t>& sizes,
                         const std::vector<uint64_t>& numels, bool exact)
    : bytes_(std::move(bytes)) {
  const uint8_t* at = bytes_.data();
  for (const size_t size : sizes) {
    if (size < kShardBytes)
      throw FrameFault("a shard has at least " + std::to_string(kShardBytes) + " bytes, not " + std::to_string(size));
    uint32_t place[2];
    std::memcpy(place, at, kShardBytes);
    Shard shard{place[0], place[1], exact && (place[0] & kExact), nullptr};
    if (shard.exact) shard.tensor -= kExact;
    if (shard.tensor >= numels.size() || shard.begin >= std::max<uint64_t>(numels[shard.tensor], 1))
      throw FrameFault("a shard begins at element " + std::to_string(shard.begin) + " of tensor " +
                       std::to_string(shard.tensor) + ", which is not there");
    std::vector<uint64_t> rest(numels.begin() + shard.tensor, numels.end());
    rest[0] -= shard.begin;
    shard.reader = std::make_unique<Reader>(at + kShardBytes, size - kShardBytes, rest, false);
    if (shard.reader->flags() & kNonFinite) throw FrameFault("a shard holds finite values only");
    for (const Section& s : shard.reader->sections()) pieces_.push_back({shard.tensor + s.id, &s, shards_.size()});
    shards_.push_back(std::move(shard));
    at += size;
  }
}

void ShardReader::entries(const Piece& piece, uint64_t* positions, float* values) const {
  const Shard& shard = shards_[piece.shard];
  shard.reader->entries(*piece.section, positions, values);
  if (piece.section->id == 0)
    for (uint64_t i = 0; i < piece.section->count; ++i) positions[i] += shard.begin;
}

void ShardReader::add(const std::vector<float*>& outs, float weight) const {
  std::vector<uint64_t> positions;
  std::vector<float> values;
  for (const Piece& piece : pieces_) {
    const Shard& shard = shards_[piece.shard];
    float* out = outs[piece.tensor];
    if (!shard.exact) {
      shard.reader->add(*piece.section, out + (piece.section->id == 0 ? shard.begin : 0), weight);
      continue;
    }
    positions.resize(piece.section->count);
    values.resize(piece.section->count);
    entries(piece, positions.data(), values.data());
    for (size_t i = 0; i < values.size(); ++i) out[positions[i]] = values[i];
  }
}

}  // namespace thinwire

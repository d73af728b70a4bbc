// Sums of frames. A range of the result stays in the cache while the entries of all frames are added to it.
#include "sum.hpp"

#include <algorithm>

namespace thinwire {

// Iterates over one section of a frame in several steps.
class Reader::Walk {
 public:
  Walk(const Reader& reader, const Section& s) : reader_(reader), section_(s), at_(s.first_block) {}

  // Adds the entries whose position is below `end`.
  template <class Place>
  void add_below(uint64_t end, float* out, float weight, Place&& place) {
    for (; at_ < section_.first_block + section_.blocks; ++at_, done_ = 0) {
      const Block& b = reader_.blocks_[at_];
      if (done_ == 0) read_block(section_.format, b.values, b.bytes, b.count, values_);
      bool whole;
      if (b.run)
        whole = add(end, out, weight, place, b.count, [&](size_t i) { return b.begin + i; });
      else if (section_.numel > ~uint32_t(0))
        whole = add(end, out, weight, place, b.count,
                    [p = reader_.positions64_.data() + b.begin](size_t i) { return p[i]; });
      else
        whole = add(end, out, weight, place, b.count,
                    [p = reader_.positions32_.data() + b.begin](size_t i) { return uint64_t(p[i]); });
      if (!whole) return;
    }
  }

 private:
  template <class Place, class Position>
  bool add(uint64_t end, float* out, float weight, Place&& place, size_t count, Position position) {
    size_t i = done_;
    if (position(count - 1) < end)
      for (; i < count; ++i) out[place(position(i))] += values_[i] * weight;
    else
      for (; position(i) < end; ++i) out[place(position(i))] += values_[i] * weight;
    done_ = i;
    return i == count;
  }

  const Reader& reader_;
  const Section& section_;
  size_t at_, done_ = 0;  // the current block, and how many of its entries were added
  float values_[kBlock];
};

void sum_frames(const std::vector<const Reader*>& frames, const std::vector<Sum>& sums, float weight) {
  constexpr uint64_t kRange = size_t(1) << 15;
  for (size_t id = 0; id < sums.size(); ++id) {
    const Sum& sum = sums[id];
    std::vector<std::pair<Reader::Walk, ShareToWhole>> walks;
    for (size_t i = 0; i < frames.size(); ++i)
      for (const Section& s : frames[i]->sections()) {
        if (s.id != id) continue;
        const uint64_t owner = i % sum.partition.world;
        if (s.numel != sum.partition.share(sum.n, owner)) throw std::invalid_argument("a frame is of another size");
        walks.emplace_back(Reader::Walk(*frames[i], s), ShareToWhole(sum.partition, owner));
      }
    // As many rounds of the partition as make up a range. The entries of a round of a share lie in the same round of
    // the whole vector.
    const uint64_t rounds = std::max<uint64_t>(kRange / kPartitionBlock / sum.partition.world, 1);
    const uint64_t step = rounds * sum.partition.world * kPartitionBlock;
    for (uint64_t begin = 0, share = 0; begin < sum.n; begin += step) {
      const uint64_t end = std::min(begin + step, sum.n);
      share += rounds * kPartitionBlock;
      std::fill(sum.out + begin, sum.out + end, 0.0f);
      for (auto& [walk, placed] : walks) {
        if (sum.partition.world == 1)
          walk.add_below(share, sum.out, weight, [](uint64_t position) { return position; });
        else
          walk.add_below(share, sum.out, weight, placed);
      }
    }
  }
}

void add_share(float* whole, uint64_t n, const Partition& partition, uint64_t owner, const float* share) {
  const uint64_t size = partition.share(n, owner);
  for (uint64_t done = 0; done < size; done += kPartitionBlock) {
    float* to = whole + partition.begin(owner, done / kPartitionBlock);
    const uint64_t count = std::min<uint64_t>(kPartitionBlock, size - done);
    for (uint64_t i = 0; i < count; ++i) to[i] = saturate(to[i] + share[done + i]);
  }
}

}  // namespace thinwire

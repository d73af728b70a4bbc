// Value formats: a block of up to kBlock floats becomes two scales and packed codes, and back.
#pragma once
#include "common.hpp"

namespace thinwire {

// The bytes of a block of n values, its scales included: exact for codes of a fixed width, else an upper bound.
size_t block_bytes(Format format, size_t n);

struct Rounding {
  bool stochastic = false;
  uint64_t seed = 0;
  uint64_t counter = 0;  // of the block's first value
};

// Writes the block to out, and the values as the receiver reads them to sent; returns the number of bytes.
size_t write_block(Format format, const float* values, size_t n, Rounding rounding, uint8_t* out, float* sent);

// Reads n values of a block of `bytes` bytes that was validated.
void read_block(Format format, const uint8_t* in, size_t bytes, size_t n, float* values);

// Sets `bytes` to the size of a block that begins at `in`, where `left` bytes are left. Returns what is wrong with its
// values, or null. A receiver must never get a value that is not finite.
const char* check_block(Format format, const uint8_t* in, size_t left, size_t n, size_t& bytes);

}  // namespace thinwire

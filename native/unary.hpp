// Values as a sign and a level in unary code: about 2.6 bits each, and never more than 3.
#pragma once
#include "common.hpp"

namespace thinwire {

// The most bytes of a block of n values: two scales of 16 bits, n signs, and n levels whose sum is at most n.
inline size_t unary_bytes(size_t n) { return 4 + (n + 7) / 8 + (2 * n + 7) / 8; }

// Writes a block whose largest magnitude is `largest`, at most kLargest; returns the number of bytes.
size_t write_unary(const float* values, size_t n, float largest, uint8_t* out, float* sent);

// Reads n values of a block of `bytes` bytes that was validated.
void read_unary(const uint8_t* in, size_t bytes, size_t n, float* values);

// Finds the size of a block that begins at `in`, where `left` bytes are left. Returns what is wrong with it, or null.
const char* check_unary(const uint8_t* in, size_t left, size_t n, size_t& bytes);

}  // namespace thinwire

// CRC-32C (Castagnoli), the checksum of a frame.
#pragma once
#include "common.hpp"

namespace thinwire {
uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size);
}

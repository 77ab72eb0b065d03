// CRC-32C (Castagnoli, as in iSCSI, SSE 4.2 and btrfs): finds every flip of up
// to three bits and every burst of up to 32 bits in a block.
//
// Parts:   crc32c(b, crc32c(a)) is the value of a followed by b.
// Check:   "123456789" has 0xe3069283.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// `seed` is the value of the bytes before.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);
// The same value without the processor's instruction for it.
uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t seed = 0);

}  // namespace tessera

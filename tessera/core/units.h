// Quantities as people read them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Powers of 1024: "0 B", "512 B", "1.5 KiB", "20.0 GiB".
std::string bytes_text(uint64_t bytes);
// Reads "4096", "4K", "64KiB", "1M", "2G" (powers of 1024); nothing where the
// text is no such number or is beyond int64.
std::optional<int64_t> parse_bytes(std::string_view text);
// Powers of 1000: "999", "12.5K", "10.2M", "1.76B", "15.0T".
std::string count_text(double count);
// "350us", "12.5ms", "3.2s", "4m05s", "2h03m", "3d04h".
std::string seconds_text(double seconds);
// With so many digits behind the point: "1.08", "12.5 %" of a share of 0.125.
std::string fixed(double value, int decimals);
std::string percent(double share);

// The multiples of `step` next to `value`, above 0: "8 or 16", "16".
std::string nearest_multiples(int64_t value, int64_t step);

// The numbers next to `value`, from 1 to `most`, that fit: "2 or 4", "1".
std::string nearest_fitting(int64_t value, int64_t most,
                            const std::function<bool(int64_t)>& fits);

// The first `most` of them: "a, b, c and 7 more".
std::string some_of(const std::vector<std::string>& names, size_t most);

}  // namespace tessera

// Which links between ranks are shown: their pairs grow with the square of the
// world.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace tessera::monitor {

inline constexpr size_t kLinksShown = 64;

// All where there are at most so many; else the slowest, slowest first, and
// last the median one. `Link`: has gbps, which may be no number.
template <typename Link>
std::vector<Link> slowest_and_median(std::vector<Link> links,
                                     size_t most = kLinksShown) {
  if (links.size() <= most) return links;
  std::ranges::stable_sort(links, {}, [](const Link& link) {
    return std::isnan(link.gbps) ? 0 : link.gbps;
  });
  links[most] = links[links.size() / 2];
  links.resize(most + 1);
  return links;
}

}  // namespace tessera::monitor

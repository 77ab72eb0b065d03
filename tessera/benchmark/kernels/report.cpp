#include "tessera/benchmark/kernels/report.h"

#include <array>

#include "tessera/benchmark/columns.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/units.h"

namespace tessera::benchmark::kernels {
namespace {

using tessera::detail::Json;

// Of the widest kernel's name, its shape, and figures of seconds.
constexpr std::array<size_t, 9> kWidths = {25, 4, 27, 5, 10, 12, 6, 7, 6};

// 1e9 a second, or "-".
std::string rate(double of_a_call, double seconds) {
  return of_a_call > 0 ? fixed(of_a_call / seconds / 1e9, 2) : "-";
}

Json rate_of(double of_a_call, double seconds) {
  return of_a_call > 0 ? Json(of_a_call / seconds / 1e9) : Json(nullptr);
}

Json json_of(const Row& row) {
  return {{"kernel", row.kernel},
          {"dtype", row.dtype},
          {"shape", row.shape},
          {"ulps", row.ulps},
          {"seconds", row.seconds},
          {"libtorch_seconds", row.libtorch_seconds},
          {"ratio", row.ratio()},
          {"gbps", rate_of(row.bytes, row.seconds)},
          {"gflops", rate_of(row.flops, row.seconds)},
          {"timings", row.timings}};
}

}  // namespace

std::string heading(const Circumstances& around) {
  return c10::str(
      heading_of(around),
      "# time: median, in turns with operators of LibTorch; ratio: theirs "
      "by ours"
      "\n# ulps: the largest error beside fp64, in units of the type's last "
      "place\n\n");
}

std::string column_names() {
  return "#" + in_columns({"kernel", "type", "shape", "ulps", "time(us)",
                           "libtorch(us)", "GB/s", "GFLOP/s", "ratio"},
                          kWidths);
}

std::string line(const Row& row) {
  return " " + in_columns({row.kernel, row.dtype, row.shape, fixed(row.ulps, 2),
                           fixed(row.seconds * 1e6, 1),
                           fixed(row.libtorch_seconds * 1e6, 1),
                           rate(row.bytes, row.seconds),
                           rate(row.flops, row.seconds), fixed(row.ratio(), 2)},
                          kWidths);
}

std::string json(const Circumstances& around, const std::vector<Row>& rows) {
  Json all = Json::array();
  for (const Row& row : rows) all.push_back(json_of(row));
  Json document = json_of(around);
  document["rows"] = all;
  return document.dump(1) + "\n";
}

}  // namespace tessera::benchmark::kernels

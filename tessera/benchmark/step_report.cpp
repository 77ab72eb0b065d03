#include "tessera/benchmark/step_report.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>

#include "tessera/benchmark/columns.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/units.h"
#include "tessera/monitor/report/chart.h"
#include "tessera/monitor/span.h"

namespace tessera::benchmark {
namespace {

using detail::Json;
using monitor::SpanKind;

constexpr size_t kKernelsShown = 16;
constexpr std::array kMemoryNames = {"activations", "parameters", "gradients",
                                     "optimizer", "from files"};
constexpr std::array kPartNames = {"y = x W^T", "dx = dy W", "dW = dy^T x"};

struct Part {
  std::string name;
  double seconds;
};

// The step of the rank by what it did, and last what no instruction was timed
// for. Kinds of which there is nothing are left out.
std::vector<Part> parts_of(const StepTimes& times) {
  std::vector<Part> parts;
  double rest = times.step.median;
  const auto add = [&](const std::string& name, double seconds) {
    if (seconds > 0) parts.push_back({name, seconds});
    rest -= seconds;
  };
  for (size_t i = 0; i < monitor::kNumSpanKinds; ++i) {
    const auto kind = static_cast<SpanKind>(i);
    const bool computes =
        kind != SpanKind::kGather && kind != SpanKind::kReduce &&
        kind != SpanKind::kMessage && kind != SpanKind::kOffload &&
        kind != SpanKind::kBatch && kind != SpanKind::kWait;
    if (computes) add(name_of(kind), times.timeline.seconds[i]);
  }
  add("exposed communication", times.timeline.exposed_comm_s());
  add("waiting for files",
      times.timeline.exposed[static_cast<size_t>(SpanKind::kOffload)]);
  add("zeroing, and between instructions", std::max(0.0, rest));
  return parts;
}

std::string share(double seconds, const StepTimes& times) {
  return fixed(100 * seconds / times.step.median, 1) + "%";
}

std::string parts_table(const StepTimes& times) {
  Lines lines = {{"where the step went", "ms", "share"}};
  for (const auto& [name, seconds] : parts_of(times)) {
    lines.push_back({name, fixed(1e3 * seconds, 2), share(seconds, times)});
  }
  return aligned(lines);
}

// By name, over units.
std::string instructions_table(const StepTimes& times) {
  std::map<std::string, InstructionTime> by_name;
  for (const auto& each : times.instructions) {
    auto& sum = by_name[each.name];
    sum.name = each.name;
    sum.count += each.count;
    sum.seconds += each.seconds;
  }
  std::vector<InstructionTime> sums;
  for (const auto& [name, sum] : by_name) sums.push_back(sum);
  std::ranges::sort(sums, std::ranges::greater{}, &InstructionTime::seconds);
  Lines lines = {{"instruction", "count", "ms", "share"}};
  for (const auto& each : sums) {
    lines.push_back({each.name, std::to_string(each.count),
                     fixed(1e3 * each.seconds, 2), share(each.seconds, times)});
  }
  return aligned(lines);
}

std::string instructions_text(const StepTimes& times) {
  if (!times.instructions.empty()) {
    return parts_table(times) + "\n" + instructions_table(times);
  }
  return "# a GPU repeats the step that it has recorded, and no instruction is "
         "run: TESSERA_WITHOUT_KERNELS=step_graph shows what each takes\n";
}

// Of the step whose kernels are listed.
std::string device_line(const StepTimes& times) {
  const DeviceTimes& device = times.device;
  if (device.launches() == 0) return {};
  std::string text = c10::str(
      "device      ", device.launches(), " kernels and copies, none running ",
      fixed(100 * (1 - device.busy_s / device.span_s), 1), "% of ",
      fixed(1e3 * device.span_s, 2), " ms; inside of it the host waited ",
      device.num_waits(), device.num_waits() == 1 ? " time" : " times");
  for (const auto& each : device.waits) {
    text += c10::str(" (", each.name, " ", each.calls, ")");
  }
  return text + "\n";
}

std::string kernels_table(const StepTimes& times) {
  Lines lines = {{"kernel", "calls", "ms", "share"}};
  KernelTime rest{.name = "all others"};
  for (size_t i = 0; i < times.kernels.size(); ++i) {
    const KernelTime& each = times.kernels[i];
    if (i >= kKernelsShown) {
      rest.calls += each.calls;
      rest.seconds += each.seconds;
      continue;
    }
    lines.push_back({each.name, std::to_string(each.calls),
                     fixed(1e3 * each.seconds, 2), share(each.seconds, times)});
  }
  if (rest.calls > 0) {
    lines.push_back({rest.name, std::to_string(rest.calls),
                     fixed(1e3 * rest.seconds, 2), share(rest.seconds, times)});
  }
  return aligned(lines);
}

double gflops(const engine::FloorProduct& product) {
  return product.flops() / product.seconds / 1e9;
}

std::string products_table(const StepTimes& times) {
  Lines lines = {{"product of the floor", "rows", "in", "out", "count", "by",
                  "ms", "GFLOP/s"}};
  for (const auto& each : times.products) {
    lines.push_back({kPartNames[each.part], std::to_string(each.shape.rows),
                     std::to_string(each.shape.in),
                     std::to_string(each.shape.out), std::to_string(each.count),
                     nn::kProductWayNames[static_cast<size_t>(each.way)],
                     fixed(1e3 * each.seconds, 3), fixed(gflops(each), 1)});
  }
  return aligned(lines);
}

std::string ranks_table(const StepTimes& times) {
  Lines lines = {{"rank", "step ms", "floor ms", "exposed ms", "bubble"}};
  for (size_t r = 0; r < times.ranks.size(); ++r) {
    const RankTimes& of = times.ranks[r];
    lines.push_back({std::to_string(r), fixed(1e3 * of.step_s, 2),
                     fixed(1e3 * of.floor_s, 2), fixed(1e3 * of.exposed_s, 2),
                     fixed(100 * of.bubble, 1) + "%"});
  }
  return aligned(lines);
}

std::string bytes_line(const StepTimes& times) {
  std::string text = "bytes       ";
  for (size_t kind = kNumMemoryKinds; kind-- > 1;) {
    text +=
        c10::str(kMemoryNames[kind], " ",
                 bytes_text(static_cast<uint64_t>(times.bytes[kind])), ", ");
  }
  return c10::str(text, "at most ",
                  bytes_text(static_cast<uint64_t>(times.peak_bytes)),
                  " in tensors (the facts say ",
                  bytes_text(static_cast<uint64_t>(times.planned_bytes)),
                  ")\nfaults      ", fixed(times.page_faults, 0),
                  " page faults in a round of floor and step\n");
}

Json json_of(const Spread& spread) {
  return {{"median", spread.median},
          {"fastest", spread.fastest},
          {"slowest", spread.slowest}};
}

Json json_of(const monitor::SecondsByKind& seconds) {
  Json all = Json::object();
  for (size_t i = 0; i < seconds.size(); ++i) {
    all[name_of(static_cast<SpanKind>(i))] = seconds[i];
  }
  return all;
}

template <typename Each, typename Of>
Json list_of(const std::vector<Each>& all, const Of& of) {
  Json list = Json::array();
  for (const auto& each : all) list.push_back(of(each));
  return list;
}

}  // namespace

std::string step_text(const MeasuredStep& step) {
  const StepTimes& times = step.times;
  std::ostringstream text;
  text << heading_of(step.around) << "# " << step.model << ", " << step.compute
       << ", mesh " << step.mesh << ", " << step.samples << " samples of "
       << step.tokens << " random tokens\n\n";
  text << "step        " << fixed(1e3 * times.step.median, 2) << " ms ("
       << fixed(1e3 * times.step.fastest, 2) << " to "
       << fixed(1e3 * times.step.slowest, 2) << "), "
       << count_text(step.tokens_per_s()) << " tokens/s\n"
       << "floor       " << fixed(1e3 * times.floor.median, 2)
       << " ms: its matrix products alone, "
       << fixed(times.floor_flops / times.floor.median / 1e9, 1) << " GFLOP/s\n"
       << "step/floor  " << fixed(times.over_floor, 3)
       << ", the median of rounds in which both alternate\n"
       << bytes_line(times) << device_line(times) << "\n"
       << instructions_text(times) << "\n"
       << kernels_table(times) << "\n"
       << products_table(times);
  if (times.ranks.size() > 1) text << "\n" << ranks_table(times);
  return text.str();
}

std::string step_json(const MeasuredStep& step) {
  const StepTimes& times = step.times;
  Json bytes = {{"at_most", times.peak_bytes},
                {"planned", times.planned_bytes}};
  for (size_t kind = 0; kind < kNumMemoryKinds; ++kind) {
    bytes[kMemoryNames[kind]] = times.bytes[kind];
  }
  Json document = json_of(step.around);
  document.update(
      Json{{"model", step.model},
           {"mesh", step.mesh},
           {"compute", step.compute},
           {"samples", step.samples},
           {"tokens", step.tokens},
           {"step_s", json_of(times.step)},
           {"floor_s", json_of(times.floor)},
           {"step_over_floor", times.over_floor},
           {"floor_flops", times.floor_flops},
           {"tokens_per_s", step.tokens_per_s()},
           {"exposed_comm_s", times.timeline.exposed_comm_s()},
           {"bubble", times.timeline.bubble},
           {"seconds", json_of(times.timeline.seconds)},
           {"exposed", json_of(times.timeline.exposed)},
           {"bytes", bytes},
           {"page_faults", times.page_faults},
           {"instructions", list_of(times.instructions,
                                    [](const InstructionTime& each) {
                                      return Json{{"name", each.name},
                                                  {"unit", each.unit},
                                                  {"count", each.count},
                                                  {"seconds", each.seconds}};
                                    })},
           {"kernels", list_of(times.kernels,
                               [](const KernelTime& each) {
                                 return Json{{"name", each.name},
                                             {"calls", each.calls},
                                             {"seconds", each.seconds}};
                               })},
           {"device",
            {{"launches", times.device.launches()},
             {"span_s", times.device.span_s},
             {"busy_s", times.device.busy_s},
             {"host_waits", times.device.num_waits()}}},
           {"products",
            list_of(times.products,
                    [](const engine::FloorProduct& each) {
                      return Json{
                          {"part", kPartNames[each.part]},
                          {"rows", each.shape.rows},
                          {"in", each.shape.in},
                          {"out", each.shape.out},
                          {"count", each.count},
                          {"by",
                           nn::kProductWayNames[static_cast<size_t>(each.way)]},
                          {"seconds", each.seconds},
                          {"gflops", gflops(each)}};
                    })},
           {"by_rank", list_of(times.ranks, [](const RankTimes& each) {
              return Json{{"step_s", each.step_s},
                          {"floor_s", each.floor_s},
                          {"exposed_comm_s", each.exposed_s},
                          {"bubble", each.bubble}};
            })}});
  return document.dump(1) + "\n";
}

// Two bars of one scale.
std::string step_picture(const MeasuredStep& step) {
  constexpr double kLeft = 60, kWidth = 640, kBar = 34, kLine = 18;
  const StepTimes& times = step.times;
  const double scale = kWidth / std::max(times.step.median, times.floor.median);
  const auto parts = parts_of(times);
  std::ostringstream bars;
  const auto bar = [&](double x, double y, double seconds,
                       const std::string& colour, const std::string& name) {
    bars << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\""
         << scale * seconds << "\" height=\"" << kBar << "\" fill=\"" << colour
         << "\"><title>" << monitor::report::escaped(name) << ": "
         << fixed(1e3 * seconds, 2) << " ms</title></rect>\n";
  };
  const auto text = [&](double x, double y, const std::string& words) {
    bars << "<text x=\"" << x << "\" y=\"" << y << "\">"
         << monitor::report::escaped(words) << "</text>\n";
  };
  text(8, 20,
       c10::str(step.model, ", ", step.compute, ", mesh ", step.mesh,
                ": step / floor ", fixed(times.over_floor, 2)));
  text(8, 38, step.around.processor);
  constexpr double kFirst = 54, kSecond = kFirst + kBar + 10;
  text(8, kFirst + kBar / 2 + 4, "floor");
  bar(kLeft, kFirst, times.floor.median, "#8a8a8a", "floor");
  text(8, kSecond + kBar / 2 + 4, "step");
  double x = kLeft, y = kSecond + kBar + 24;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string colour = monitor::report::colour_of(i);
    bar(x, kSecond, parts[i].seconds, colour, parts[i].name);
    x += scale * parts[i].seconds;
    bars << "<rect x=\"" << kLeft << "\" y=\"" << y - 10
         << "\" width=\"11\" height=\"11\" fill=\"" << colour << "\"/>\n";
    text(kLeft + 18, y,
         c10::str(parts[i].name, "  ", fixed(1e3 * parts[i].seconds, 1),
                  " ms, ", share(parts[i].seconds, times)));
    y += kLine;
  }
  std::ostringstream svg;
  svg << R"(<svg xmlns="http://www.w3.org/2000/svg" width=")"
      << kLeft + kWidth + 16 << "\" height=\"" << y
      << "\" font-family=\"sans-serif\" font-size=\"12\">\n"
      << R"(<rect width="100%" height="100%" fill="white"/>)" << "\n"
      << bars.str() << "</svg>\n";
  return svg.str();
}

}  // namespace tessera::benchmark

#include "tessera/monitor/report/page.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

#include "tessera/core/units.h"
#include "tessera/monitor/links.h"

namespace tessera::monitor::report {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --line: #8884; --soft: #777 }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1200px;
  margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin: 0 0 .2em }
h2 { font-size: 1.1em; margin: 2em 0 .6em }
.charts { display: grid; gap: 18px;
  grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)) }
figure { margin: 0 }
figcaption { margin-bottom: 2px }
figcaption i, .soft { color: var(--soft); font-style: normal }
svg { width: 100%; height: auto; display: block }
svg path { fill: none; stroke-width: 1.5; stroke-linejoin: round;
  stroke-linecap: round }
svg .grid { stroke: var(--line); stroke-width: .7 }
svg .mark { stroke: #d33; stroke-dasharray: 3 3 }
svg text { font-size: 10.5px; fill: currentColor; opacity: .75 }
svg text.y { text-anchor: end }
svg text.x { text-anchor: middle }
table { border-collapse: collapse }
td, th { padding: .2em .9em .2em 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
details { margin-top: 1em }
summary { cursor: pointer }
.events td:first-child, .samples td:first-child { white-space: nowrap;
  color: var(--soft) }
.samples td { white-space: pre-wrap }
.samples i { color: var(--soft); font-style: normal }
.warning { color: #c60 }
.error { color: #d22 }
)";

// A figure of metrics.jsonl, or several on one chart.
struct ChartPanel {
  const char* title;
  const char* unit;
  std::vector<std::pair<const char*, const char*>> figures;  // key, name
};

const std::vector<ChartPanel>& panels() {
  static const std::vector<ChartPanel> all = {
      {"loss",
       "nats a token",
       {{"loss", "training"}, {"valid_loss", "validation"}}},
      {"throughput", "tokens a second, all ranks", {{"tokens_per_s", ""}}},
      {"learning rate", "", {{"lr", ""}}},
      {"gradient norm", "before clipping", {{"grad_norm", ""}}},
      {"a step",
       "seconds",
       {{"step_s", "whole"},
        {"comm_s", "communication under way"},
        {"exposed_comm_s", "communication waited for"}}},
      {"model FLOPs utilisation", "of a rank's measured peak", {{"mfu", ""}}},
      {"pipeline bubble", "share of the step", {{"bubble", ""}}},
      {"memory", "MiB, peak of the worst rank", {{"mem_peak_mib", ""}}},
      {"communication", "GB a second", {{"comm_gbps", ""}}},
      {"auxiliary loss of experts", "", {{"aux_loss", ""}}},
      {"multi-token prediction",
       "nats a token, mean over depths",
       {{"mtp_loss", ""}}},
  };
  return all;
}

// Figures of which there are several: the beginning of their names.
struct Parts {
  std::string_view prefix;
  const char* title;
  const char* unit;
};
constexpr Parts kParts[] = {
    {"expert_load.", "load of experts", "share of all rows"},
    {"expert_imbalance.", "imbalance of experts by layer",
     "largest load over the mean"},
    {"expert_dropped.", "dropped by experts, by layer", "share of choices"},
    {"routing_entropy.", "entropy of routing by layer", "nats"},
    {"seconds.", "where a step goes", "seconds by kind, mean over ranks"},
    {"work_s_by_rank.", "work by rank", "seconds without waits"},
    {"comm_s_by_rank.", "communication by rank", "seconds under way"},
    {"exposed_comm_s_by_rank.", "communication waited for, by rank", "seconds"},
    {"comm_bytes_by_rank.", "communication by rank", "bytes"},
    {"bubble_by_rank.", "pipeline bubble by rank", "share of the step"},
    {"mem_peak_mib_by_rank.", "memory by rank", "MiB at the peak"},
};

std::string row(const std::vector<std::string>& cells, const char* tag = "td",
                size_t first_number = 1) {
  std::string text = "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    text += c10::str("<", tag, i >= first_number ? " class=\"n\">" : ">",
                     escaped(cells[i]), "</", tag, ">");
  }
  return text + "</tr>\n";
}

std::string setting(const RunHistory& run, const std::string& key) {
  const auto found = run.settings.find(key);
  return found == run.settings.end() ? "" : found->second;
}

std::string unquoted(std::string text) {
  std::erase(text, '"');
  return text;
}

std::string mesh_of(const RunHistory& run) {
  std::string text;
  for (const char* axis :
       {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}) {
    const std::string degree = setting(run, std::string("mesh.") + axis);
    if (degree.empty() || degree == "0" || degree == "1") continue;
    text += c10::str(text.empty() ? "" : " x ", axis, " ", degree);
  }
  return text.empty() ? "one rank" : text;
}

std::string said(const RunHistory& run, const std::string& key) {
  const auto found = run.summary.find(key);
  return found == run.summary.end() ? "" : found->second;
}

std::string number_said(const RunHistory& run, const std::string& key) {
  const std::string text = said(run, key);
  return text.empty() ? text : short_number(std::stod(text));
}

// A row a run: what it was and how it ended.
std::string overview(const std::vector<RunHistory>& runs) {
  std::string text =
      "<table>" +
      row({"run", "model", "mesh", "ended", "steps", "tokens", "seconds",
           "tokens/s", "last loss", "best validation", "memory MiB"},
          "th", 4);
  for (const RunHistory& run : runs) {
    text += row(
        {run.name,
         c10::str(unquoted(setting(run, "model.family")), ", ",
                  setting(run, "model.layers"), " x ",
                  setting(run, "model.hidden")),
         mesh_of(run), said(run, "reason"),
         said(run, "steps") + "/" + said(run, "total_steps"),
         number_said(run, "tokens"), number_said(run, "seconds"),
         number_said(run, "tokens_per_s"), number_said(run, "last_loss"),
         number_said(run, "best_valid_loss"), number_said(run, "mem_peak_mib")},
        "td", 4);
  }
  return text + "</table>\n";
}

bool is_worth_a_line(const Points& points) {
  return std::ranges::any_of(points, [](const auto& point) {
    return point.second != 0;  // no bubble, no communication
  });
}

// Where it has nothing to show it is a line without points, so that a run has
// the same colour on every chart.
void add_line(const RunHistory& run, const char* key, const std::string& name,
              Chart& chart) {
  const auto found = run.figures.find(key);
  const bool shows =
      found != run.figures.end() && is_worth_a_line(found->second);
  chart.series.push_back({name, shows ? found->second : Points{}});
}

// Of one run, its figures on one chart.
std::string panel_of(const ChartPanel& panel, const RunHistory& run) {
  Chart chart{.title = panel.title,
              .unit = panel.unit,
              .series = {},
              .marks = run.resumed_after};
  for (const auto& [key, name] : panel.figures) add_line(run, key, name, chart);
  return svg(chart);
}

// Of several, each figure on a chart of its own, where a colour is a run.
std::string panels_of(const ChartPanel& panel,
                      const std::vector<RunHistory>& runs) {
  std::string text;
  for (const auto& [key, name] : panel.figures) {
    Chart chart{.title = *name == '\0' ? panel.title
                                       : c10::str(panel.title, ", ", name),
                .unit = panel.unit};
    for (const RunHistory& run : runs) add_line(run, key, run.name, chart);
    text += svg(chart);
  }
  return text;
}

// The figures of one run whose names begin so, each a line.
std::string panel_of_parts(const RunHistory& run, std::string_view prefix,
                           const std::string& title, const char* unit) {
  Chart chart{
      .title = title, .unit = unit, .series = {}, .marks = run.resumed_after};
  for (const auto& [key, points] : run.figures) {
    if (!key.starts_with(prefix) || !is_worth_a_line(points)) continue;
    chart.series.push_back({key.substr(prefix.size()), points});
  }
  return svg(chart);
}

std::string charts(const std::vector<RunHistory>& runs) {
  std::string text = "<h2>Figures by step</h2><div class=\"charts\">";
  for (const ChartPanel& panel : panels()) {
    text += runs.size() == 1 ? panel_of(panel, runs.front())
                             : panels_of(panel, runs);
  }
  for (const RunHistory& run : runs) {
    const std::string of = runs.size() == 1 ? "" : " of " + run.name;
    for (const Parts& parts : kParts) {
      text += panel_of_parts(run, parts.prefix, parts.title + of, parts.unit);
    }
  }
  return text + "</div>\n";
}

// Of many, so many from the first to the last, and so many characters of each.
constexpr size_t kSamplesShown = 40;
constexpr size_t kCharactersShown = 4000;

bool begins_character(char byte) { return (byte & 0xc0) != 0x80; }

std::string shortened(const std::string& text) {
  size_t end = 0, count = 0;
  for (; end < text.size(); ++end) {
    if (begins_character(text[end]) && ++count > kCharactersShown) break;
  }
  if (end == text.size()) return escaped(text);
  const auto left_out = std::count_if(text.begin() + static_cast<int64_t>(end),
                                      text.end(), begins_character);
  return c10::str(escaped(text.substr(0, end)), "<span class=\"soft\"> ... ",
                  left_out,
                  " characters are left out: all are in samples.jsonl.</span>");
}

std::string samples(const RunHistory& run) {
  if (run.samples.empty()) return "";
  const size_t all = run.samples.size();
  const size_t shown = std::min(all, kSamplesShown);
  std::string text = "<h2>What the model wrote, " + escaped(run.name) +
                     "</h2><table class=\"samples\">";
  for (size_t i = 0; i < shown; ++i) {
    const WrittenText& sample =
        run.samples[shown == 1 ? 0 : i * (all - 1) / (shown - 1)];
    text += c10::str("<tr><td>step ", sample.step, "</td><td><i>",
                     shortened(sample.prompt), "</i>", shortened(sample.text),
                     "</td></tr>\n");
  }
  text += "</table>\n";
  if (shown == all) return text;
  return text + c10::str("<p class=\"soft\">", shown, " of ", all,
                         ": all are in samples.jsonl.</p>\n");
}

// Of many those that worked longest.
std::string ranks_of(const RunHistory& run) {
  constexpr size_t kShown = 64;
  if (run.ranks.empty()) return "";
  std::vector<Rank> ranks = run.ranks;
  if (ranks.size() > kShown) {
    std::ranges::sort(ranks, std::ranges::greater{}, &Rank::work_s);
    ranks.resize(kShown);
  }
  std::string text =
      "<h2>Ranks, " + escaped(run.name) + "</h2><table>" +
      row({"rank", "worked, s", "waited, s", "slowest in steps", "memory, MiB"},
          "th");
  for (const Rank& of : ranks) {
    text += row({std::to_string(of.rank), short_number(of.work_s),
                 short_number(of.wait_s), std::to_string(of.slowest_in),
                 short_number(of.mem_peak_mib)});
  }
  return text + "</table>\n";
}

// A summary of today has no more than these, within hosts and between them.
std::vector<Link> shown_links(const RunHistory& run) {
  const bool are_few = run.links.size() <= 2 * (kLinksShown + 1);
  return are_few ? run.links : slowest_and_median(run.links);
}

std::string communication(const RunHistory& run) {
  std::string text;
  if (!run.traffic.empty()) {
    text +=
        "<h2>Communication of rank 0, " + escaped(run.name) + "</h2><table>" +
        row({"group", "verb", "calls", "bytes", "seconds", "GB/s"}, "th", 2);
    for (const Traffic& of : run.traffic) {
      text += row({of.group, of.verb, std::to_string(of.calls),
                   bytes_text(of.bytes), short_number(of.seconds),
                   of.seconds > 0 ? short_number(static_cast<double>(of.bytes) /
                                                 of.seconds / 1e9)
                                  : ""},
                  "td", 2);
    }
    text += "</table>\n";
  }
  if (!run.links.empty()) {
    text += "<h2>Links between ranks, " + escaped(run.name) + "</h2><table>" +
            row({"ranks", "latency, us", "GB/s"}, "th");
    for (const Link& link : shown_links(run)) {
      text += row({c10::str(link.from, " - ", link.to),
                   short_number(link.latency_us), short_number(link.gbps)});
    }
    text += "</table>\n";
  }
  return text;
}

constexpr std::string_view kOfCheckpoint = "checkpoint of step ";

bool is_of_checkpoint(const Event& event) {
  return event.text.starts_with(kOfCheckpoint);
}

// "checkpoint of step 20 is in FOLDER", between these words.
std::string step_of_checkpoint(const Event& event) {
  const std::string text = event.text.substr(kOfCheckpoint.size());
  return text.substr(0, text.find(' '));
}

// What happened, where checkpoints that follow each other are one line.
std::vector<Event> told(const std::vector<Event>& events) {
  std::vector<Event> told;
  for (auto at = events.begin(); at != events.end();) {
    const auto end = std::find_if_not(at, events.end(), is_of_checkpoint);
    if (end - at <= 2) {
      told.push_back(*at++);
      continue;
    }
    const Event& last = *(end - 1);
    told.push_back({.time = at->time,
                    .text = c10::str(end - at, " checkpoints, of step ",
                                     step_of_checkpoint(*at), " to step ",
                                     step_of_checkpoint(last), ", the last at ",
                                     last.time)});
    at = end;
  }
  return told;
}

std::string events(const RunHistory& run) {
  if (run.events.empty()) return "";
  std::string text = "<h2>What happened, " + escaped(run.name) +
                     "</h2><table class=\"events\">";
  for (const Event& event : told(run.events)) {
    const char* const kind = event.text.starts_with("warning") ? "warning"
                             : event.text.find("error") != std::string::npos
                                 ? "error"
                                 : "";
    text += c10::str("<tr><td>", escaped(event.time), "</td><td class=\"", kind,
                     "\">", escaped(event.text), "</td></tr>\n");
  }
  return text + "</table>\n";
}

// Of several runs, what is not the same in all comes first.
std::string configurations(const std::vector<RunHistory>& runs) {
  std::set<std::string> keys;
  std::vector<std::string> names = {"key"};
  for (const RunHistory& run : runs) {
    for (const auto& [key, value] : run.settings) keys.insert(key);
    names.push_back(run.name);
  }
  std::string different, whole;
  for (const std::string& key : keys) {
    std::vector<std::string> cells = {key};
    for (const RunHistory& run : runs) cells.push_back(setting(run, key));
    const std::string line = row(cells, "td", cells.size());
    whole += line;
    const bool same =
        std::all_of(cells.begin() + 1, cells.end(),
                    [&](const auto& each) { return each == cells[1]; });
    if (!same) different += line;
  }
  const std::string head = "<table>" + row(names, "th", names.size());
  std::string text;
  if (!different.empty()) {
    text = "<h2>Configured otherwise</h2>" + head + different + "</table>\n";
  }
  return text + "<details><summary>The whole configuration</summary>" + head +
         whole + "</table></details>\n";
}

constexpr std::string_view kBeginOfPage = "<!doctype html><html lang=\"en\">";
constexpr std::string_view kEndOfTitle = " - Tessera</title>";

}  // namespace

bool is_page(const std::string& text) {
  const size_t title = text.find(kEndOfTitle);
  return text.starts_with(kBeginOfPage) && title < text.find('\n');
}

std::string page_of(const std::vector<RunHistory>& runs) {
  std::vector<std::string> names;
  for (const RunHistory& run : runs) names.push_back(run.name);
  const std::string title = escaped(c10::Join(", ", names));
  std::string text =
      c10::str(kBeginOfPage,
               "<meta charset=\"utf-8\"><meta name=\"viewport\" "
               "content=\"width=device-width\">"
               "<title>",
               title, kEndOfTitle, "<style>", kStyle, "</style><h1>", title,
               "</h1>\n", overview(runs), charts(runs));
  if (runs.size() == 1 && !runs.front().resumed_after.empty()) {
    text += "<p class=\"soft\">A red line: the run was resumed there.</p>\n";
  }
  for (const RunHistory& run : runs) text += samples(run);
  for (const RunHistory& run : runs) text += ranks_of(run) + communication(run);
  for (const RunHistory& run : runs) text += events(run);
  return text + configurations(runs) + "</html>\n";
}

}  // namespace tessera::monitor::report

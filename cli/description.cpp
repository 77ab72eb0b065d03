#include "cli/description.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

using detail::Json;

constexpr size_t kNamedAtMost = 16;
// As metrics.jsonl and summary.json call them.
constexpr std::array kFirstFigures = {
    "reason",    "step",       "steps",           "loss",
    "last_loss", "valid_loss", "best_valid_loss", "tokens_per_s",
    "mfu",       "step_s",     "seconds"};

std::string cell(const std::string& key, const Json& value);

std::string list_text(const Json& list) {
  std::vector<std::string> texts;
  for (const Json& each : list) texts.push_back(cell("", each));
  return some_of(texts, kNamedAtMost);
}

std::string cell(const std::string& key, const Json& value) {
  if (value.is_null()) return "none";
  if (key == "bytes") return bytes_text(value.get<uint64_t>());
  if (value.is_number_float()) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value.get<double>());
    return text;
  }
  return printable(value.is_string() ? value.get<std::string>() : value.dump());
}

std::string first_figures(const Json& all) {
  std::string text;
  for (const std::string name : kFirstFigures) {
    const auto found = all.find(name);
    if (found == all.end() || found->is_null() || found->is_structured()) {
      continue;
    }
    text += (text.empty() ? "" : ", ") + name + " " + cell(name, *found);
  }
  return text;
}

void print_table(const Json& rows) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : rows.front().items()) keys.push_back(key);
  std::vector<std::vector<std::string>> lines = {keys};
  for (const Json& row : rows) {
    lines.emplace_back();
    for (const std::string& key : keys) {
      lines.back().push_back(row.contains(key) ? cell(key, row[key]) : "");
    }
  }
  std::vector<size_t> widths(keys.size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      widths[i] = std::max(widths[i], line[i].size());
    }
  }
  for (const auto& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      text += line[i];
      if (i + 1 < line.size()) text.append(widths[i] + 2 - line[i].size(), ' ');
    }
    std::cout << "  " << text << "\n";
  }
}

void print_line(const std::string& key, const std::string& text) {
  std::cout << std::left << std::setw(12) << key + " " << text << "\n";
}

}  // namespace

void print_description(const Json& description) {
  for (const auto& [key, value] : description.items()) {
    const bool is_table =
        value.is_array() && (value.empty() || value.front().is_object());
    if (key == "values") continue;  // "text" says the same
    if (key == "text") {
      std::cout << printable(value.get<std::string>(), /*keeps_lines=*/true);
    } else if (is_table) {
      std::cout << key << " (" << value.size() << ")\n";
      if (!value.empty()) print_table(value);
    } else if (value.is_array()) {
      print_line(key, list_text(value));
    } else if (key == "last step" || key == "summary") {
      print_line(key,
                 value.is_object() ? first_figures(value) : cell(key, value));
    } else {
      print_line(key, cell(key, value));
    }
  }
}

}  // namespace tessera::cli

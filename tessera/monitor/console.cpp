#include "tessera/monitor/console.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <sstream>

#include "tessera/core/printable.h"
#include "tessera/core/screen.h"

namespace tessera::monitor {
namespace {

// The time left is judged by as many of the last steps.
constexpr size_t kWindow = 100;

const char* const kRed = "\033[31m";
const char* const kGreen = "\033[32m";
const char* const kYellow = "\033[33m";
const char* const kBlue = "\033[34m";
const char* const kMagenta = "\033[35m";
const char* const kCyan = "\033[36m";

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

__attribute__((format(printf, 1, 2))) std::string format(const char* form,
                                                         ...) {
  char text[128];
  va_list values;
  va_start(values, form);
  std::vsnprintf(text, sizeof text, form, values);
  va_end(values);
  return text;
}

// Fields of a line, two blanks apart.
class Line {
 public:
  explicit Line(bool colour) : colour_(colour) {}
  void add(const char* colour, const std::string& field) {
    if (!text_.empty()) text_ += "  ";
    text_ += colour_ ? colour + field + "\033[39m" : field;
  }
  const std::string& str() const { return text_; }

 private:
  bool colour_;
  std::string text_;
};

double steady_seconds() {
  using std::chrono::duration;
  return duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

bool wants_colour() {
  if (is_set("NO_COLOR")) return false;
  const char* terminal = std::getenv("TERM");
  if (terminal != nullptr && std::strcmp(terminal, "dumb") == 0) return false;
  return isatty(STDERR_FILENO) == 1 || is_set(kTerminalVariable);
}

std::string format_duration(double seconds) {
  const auto s = std::llround(std::clamp(seconds, 0.0, 1e9));
  if (s < 60) return format("%llds", s);
  if (s < 3600) return format("%lldm%02llds", s / 60, s % 60);
  const auto minutes = s / 60;
  if (s < 86400) return format("%lldh%02lldm", minutes / 60, minutes % 60);
  return format("%lldd%02lldh", s / 86400, s / 3600 % 24);
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t at = digits.size(); at > first + 3; at -= 3) {
    digits.insert(at - 3, ",");
  }
  return digits;
}

Console::Console(const RunInfo& info, ConsoleOptions options)
    : info_(info), options_(std::move(options)) {
  if (!options_.clock) options_.clock = steady_seconds;
}

void Console::step(const StepRecord& record) {
  times_.push_back(options_.clock());
  if (times_.size() > kWindow) times_.pop_front();
  if (!is_shown(record)) return;
  show(line_of(record));
  if (record.validation) {
    show(validation_line_of(record.step, *record.validation));
  }
  if (record.sample) show(sample_lines_of(record.step, *record.sample));
}

void Console::validated_at_start(const Validation& validation) {
  show(validation_line_of(0, validation));
}

void Console::show(const std::string& line) const {
  if (options_.out == nullptr) {
    show_on_screen(line + "\n");
  } else {
    *options_.out << line + "\n" << std::flush;
  }
}

void Console::close(const RunEnd& /*end*/) {}

bool Console::is_shown(const StepRecord& record) const {
  return record.step == info_.first_step + 1 ||
         record.step == info_.total_steps ||
         record.step % std::max<int64_t>(1, options_.every) == 0 ||
         record.validation.has_value() || record.sample.has_value();
}

std::string Console::line_of(const StepRecord& record) const {
  const std::string total = std::to_string(info_.total_steps);
  const int width = std::max<int>(2, static_cast<int>(total.size()));
  Line line(options_.colour);
  line.add(kRed, format("step: %*lld/%s", width,
                        static_cast<long long>(record.step), total.c_str()));
  line.add(kGreen, format("loss: %8.5f", record.loss));
  line.add(kBlue, format("lr: %.2e", record.lr));
  line.add(kYellow, format("grad_norm: %7.4f", record.grad_norm));
  const int64_t tokens = info_.tokens_before + record.step * record.tokens;
  line.add(kCyan, "tokens: " + with_commas(tokens));
  if (info_.steps_per_epoch > 0) {
    const double per_epoch =
        info_.steps_per_epoch * static_cast<double>(record.tokens);
    line.add(kCyan,
             format("epoch: %.2f", static_cast<double>(tokens) / per_epoch));
  }
  line.add(kBlue, rate_of(record.tokens_per_s));
  if (record.mfu) line.add(kMagenta, format("mfu: %.2f%%", 100 * *record.mfu));
  line.add(kCyan, memory_of(record));
  line.add(kGreen, "left: " + format_duration(seconds_left(record)));
  return line.str();
}

std::string Console::validation_line_of(int64_t step,
                                        const Validation& valid) const {
  Line line(options_.colour);
  line.add(kRed, format("validate step: %lld", static_cast<long long>(step)));
  line.add(kGreen, format("loss: %8.5f", valid.loss));
  if (valid.seconds > 0) {
    line.add(kBlue, rate_of(static_cast<double>(valid.tokens) / valid.seconds));
  }
  return line.str();
}

std::string Console::sample_lines_of(int64_t step, const Sample& sample) const {
  Line line(options_.colour);
  line.add(kRed, format("sample step: %lld", static_cast<long long>(step)));
  line.add(kBlue,
           format("tokens: %lld in %.2fs",
                  static_cast<long long>(sample.tokens), sample.seconds));
  std::string text = line.str();
  std::istringstream lines(
      printable(sample.prompt + sample.text, /*keeps_lines=*/true));
  for (std::string each; std::getline(lines, each);) text += "\n  | " + each;
  return text;
}

std::string Console::rate_of(double tokens_per_s) const {
  const std::string whole =
      "tokens/s: " + with_commas(std::llround(tokens_per_s));
  if (info_.world_size == 1) return whole;
  const double each = tokens_per_s / static_cast<double>(info_.world_size);
  return whole + " (" + with_commas(std::llround(each)) + " a rank)";
}

std::string Console::memory_of(const StepRecord& record) const {
  std::string text = format("memory: %5.2fGiB", record.mem_peak_mib / 1024);
  if (info_.host_memory_mib > 0) {
    text +=
        format("(%.2f%%)", 100 * record.mem_peak_mib / info_.host_memory_mib);
  }
  return text;
}

// From the time between records, which validation and checkpoints are part of.
double Console::seconds_left(const StepRecord& record) const {
  const double each = times_.size() < 2
                          ? record.step_s
                          : (times_.back() - times_.front()) /
                                static_cast<double>(times_.size() - 1);
  return each * static_cast<double>(
                    std::max<int64_t>(0, info_.total_steps - record.step));
}

}  // namespace tessera::monitor

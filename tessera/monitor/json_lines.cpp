#include "tessera/monitor/json_lines.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/monitor/detail/json_text.h"
#include "tessera/monitor/fields.h"

namespace tessera::monitor {
namespace {

constexpr std::string_view kBegin = "{\"step\":";
constexpr size_t kMostPending = size_t{64} << 20;  // bytes

// The step of a whole line as to_json_line writes it.
std::optional<int64_t> step_of(std::string_view line) {
  if (!line.starts_with(kBegin) || !line.ends_with('}')) return std::nullopt;
  line.remove_prefix(kBegin.size());
  int64_t step = 0;
  const auto [stop, error] =
      std::from_chars(line.data(), line.data() + line.size(), step);
  if (error != std::errc() || *stop != ',') return std::nullopt;
  return step;
}

}  // namespace

std::string to_json_line(const StepRecord& record) {
  detail::JsonText line;
  for (const Field& field : fields()) {
    const std::optional<double> value = field.value(record);
    if (value && field.whole) {
      line.number(field.name, static_cast<int64_t>(*value));
    } else if (value || field.when == Field::kAlways) {
      line.number(field.name, value);
    }
  }
  if (record.seconds) {
    detail::JsonText seconds;
    for (size_t i = 0; i < kNumSpanKinds; ++i) {
      seconds.number(name_of(static_cast<SpanKind>(i)), (*record.seconds)[i]);
    }
    line.object("seconds", seconds);
  }
  for (const ListField& field : list_fields()) {
    const auto& values = record.*field.values;
    if (!values.empty()) line.numbers(field.name, values);
  }
  return line.str();
}

LineFile::LineFile(const std::string& path) : path_(path) {
  refuse_irregular(path);
  fd_.reset(
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  TS_CHECK_IO(fd_.open(), "monitor: cannot open ", path,
              " for appending: ", std::strerror(errno), ".");
  // What an earlier start's summary says has ended goes on.
  futimens(fd_.get(), nullptr);
}

void JsonLines::step(const StepRecord& record) {
  file_.add(to_json_line(record), record.step);
}

void SampleLines::step(const StepRecord& record) {
  if (!record.sample) return;
  file_.add(detail::JsonText()
                .number("step", record.step)
                .text("prompt", record.sample->prompt)
                .text("text", record.sample->text)
                .number("tokens", record.sample->tokens)
                .number("seconds", record.sample->seconds)
                .str(),
            record.step);
}

void LineFile::add(const std::string& line, int64_t step) {
  pending_ += line + "\n";
  const std::string complaint = write_pending();
  if (complaint.empty() && told_) {
    log::info("monitor: ", path_, " can be written again, up to step ", step);
  } else if (!complaint.empty() && !told_) {
    log::warning("monitor: step ", step, " cannot be written to ", path_, ": ",
                 complaint,
                 ". The run goes on; lines are kept until "
                 "there is room.");
  }
  told_ = !complaint.empty();
}

void LineFile::sync() { fsync(fd_.get()); }

void LineFile::close() {
  const std::string complaint = write_pending();
  TS_CHECK_IO(complaint.empty(), "monitor: the last lines of ", path_,
              " could not be written: ", complaint, ".");
  sync();
}

std::string LineFile::write_pending() {
  if (pending_.empty()) return "";
  const off_t before = lseek(fd_.get(), 0, SEEK_END);
  const ssize_t written = write(fd_.get(), pending_.data(), pending_.size());
  const std::string why =
      written < 0 ? std::strerror(errno) : "the disk is full";
  if (written == static_cast<ssize_t>(pending_.size())) {
    pending_.clear();
    return "";
  }
  // What fitted would tear a line.
  const bool whole = written <= 0 || ftruncate(fd_.get(), before) == 0;
  TS_CHECK_IO(whole, "monitor: a line of ", path_, " was torn: ", why, ".");
  TS_CHECK_IO(pending_.size() < kMostPending, "monitor: ", path_,
              " cannot be written, and no more lines are kept: ", why, ".");
  return why;
}

bool for_each_line(const std::string& path,
                   const std::function<bool(const std::string& line)>& take) {
  refuse_irregular(path);
  std::ifstream file(path);
  if (!file.is_open()) return false;
  // getline hits the end of the file where the last line is torn.
  for (std::string line; std::getline(file, line) && !file.eof();) {
    if (!take(line)) break;
  }
  return true;
}

std::string last_line_of(const std::string& path) {
  constexpr std::streamoff kTail = 1 << 20;
  refuse_irregular(path);
  std::ifstream file(path, std::ios::ate);
  if (!file.is_open()) return "";
  const std::streamoff size = file.tellg();
  std::string last;
  for (std::streamoff tail = kTail; last.empty(); tail *= 2) {
    const std::streamoff begin = std::max<std::streamoff>(0, size - tail);
    file.clear();
    file.seekg(begin);
    std::string line;
    if (begin > 0) std::getline(file, line);  // of which it may be the end
    while (std::getline(file, line) && !file.eof()) last = line;
    if (begin == 0) break;
  }
  return last;
}

void truncate_after(const std::string& path, int64_t step) {
  uint64_t keep = 0, end = 0;             // bytes
  int64_t damaged = 0, seen_damaged = 0;  // lines before `keep`, before `end`
  const auto walk = [&](const auto& take) {
    end = 0;
    return for_each_line(path, [&](const std::string& line) {
      const auto its_step = step_of(line);
      end += line.size() + 1;
      return (!its_step || *its_step <= step) && take(line, its_step);
    });
  };
  const bool is_there = walk([&](const std::string&, const auto& its_step) {
    if (!its_step) ++seen_damaged;
    if (its_step) std::tie(keep, damaged) = std::pair(end, seen_damaged);
    return true;
  });
  if (!is_there) return;
  if (damaged > 0) {
    std::string good;
    walk([&](const std::string& line, const auto& its_step) {
      if (its_step) good += line + '\n';
      return end < keep;
    });
    write_file_atomic(path, good);
    log::warning(path, ": ", damaged, " damaged lines were left out");
    return;
  }
  std::error_code error;
  if (keep == std::filesystem::file_size(path, error) && !error) return;
  std::filesystem::resize_file(path, keep, error);
  TS_CHECK_IO(!error, "monitor: cannot cut ", path, " off after step ", step,
              ": ", error.message(), ".");
}

}  // namespace tessera::monitor

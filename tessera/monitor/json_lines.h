// metrics.jsonl: one line a step, in one write, so that a killed run leaves
// whole lines. A write that crosses a page may be cut there by the kill: a torn
// last line is dropped at the next start. Where the disk is full, lines wait in
// memory for room, and the run goes on.
//
// Unknown values are null; a loss that is not finite is null too, as JSON has
// no other word for it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/core/fd.h"
#include "tessera/monitor/sink.h"

namespace tessera::monitor {

// Whole lines, appended.
class LineFile {
 public:
  explicit LineFile(const std::string& path);
  void add(const std::string& line, int64_t step);
  void sync();
  void close();  // TS_CHECK_IO where lines are still pending

 private:
  std::string write_pending();  // "", or why it cannot be written

  std::string path_;
  Fd fd_;
  std::string pending_;  // whole lines
  bool told_ = false;    // that lines are pending
};

class JsonLines : public Sink {
 public:
  explicit JsonLines(const std::string& path) : file_(path) {}
  void step(const StepRecord& record) override;
  void sync() override { file_.sync(); }
  void close(const RunEnd& /*end*/) override { file_.close(); }

 private:
  LineFile file_;
};

// samples.jsonl: a line for each text that the model wrote.
class SampleLines : public Sink {
 public:
  explicit SampleLines(const std::string& path) : file_(path) {}
  void step(const StepRecord& record) override;
  void sync() override { file_.sync(); }
  void close(const RunEnd& /*end*/) override { file_.close(); }

 private:
  LineFile file_;
};

// The line, without its end.
std::string to_json_line(const StepRecord& record);

// Each line of such a file, in order, for as long as `take` wants more; what a
// kill tore at its end is left out. False: there is no file to read.
bool for_each_line(const std::string& path,
                   const std::function<bool(const std::string& line)>& take);

// The last whole line, however long the file is; "": there is none.
std::string last_line_of(const std::string& path);

// Cuts the file off where steps after `step` begin, so that a run that goes on
// from there has each step once. Damaged lines among the others go, with a
// warning. No file: nothing to do.
void truncate_after(const std::string& path, int64_t step);

}  // namespace tessera::monitor

// events.out.tfevents.*: scalars for TensorBoard, with torchtitan's tags, and
// texts.
//
// The file is a sequence of records (length, masked CRC32C of it, an Event
// message, masked CRC32C of that), encoded by hand: both need few fields.
// Each start writes a file of its own; after a resume its first event tells
// TensorBoard to forget steps that are taken again.
// Source: event.proto and record_writer in tensorflow/core
#pragma once

#include <fstream>
#include <string>

#include "tessera/monitor/sink.h"

namespace tessera::monitor {

class TensorBoard : public Sink {
 public:
  // The file goes into info.folder.
  explicit TensorBoard(const RunInfo& info);
  void validated_at_start(const Validation& validation) override;
  void step(const StepRecord& record) override;
  void close(const RunEnd& end) override;

  const std::string& path() const { return path_; }

 private:
  void write_values(int64_t step, const std::string& values);
  void write_record(const std::string& event);

  RunInfo info_;
  std::string path_;
  std::ofstream file_;
  bool broken_ = false;  // it could not be written, which was said
};

}  // namespace tessera::monitor

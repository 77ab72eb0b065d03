// The numbers of a StepRecord, each once: its name in metrics.jsonl, its tag in
// TensorBoard, where its value lies. To add one: a member of StepRecord and a
// line in fields.cpp.
#pragma once

#include <optional>
#include <vector>

#include "tessera/monitor/step_record.h"

namespace tessera::monitor {

inline constexpr const char* kValidLossTag = "validation_metrics/loss";

struct Field {
  const char* name;
  std::optional<double> (*value)(const StepRecord& record);
  enum { kAlways, kIfKnown } when = kIfKnown;  // unknown: null, or absent
  const char* tag = nullptr;                   // nullptr: not in TensorBoard
  double tag_factor = 1;                       // to the unit of the tag
  bool whole = false;                          // an integer
};

// In the order of a line.
const std::vector<Field>& fields();

// Numbers of which there are several, absent where there are none; in
// TensorBoard as `name`/0, /1 and so on.
struct ListField {
  const char* name;
  std::vector<double> StepRecord::* values;
};
const std::vector<ListField>& list_fields();

}  // namespace tessera::monitor

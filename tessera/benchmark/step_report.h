// What `tessera bench step` shows: tables for people, all figures as JSON, and
// a picture of where the step went beside its floor.
#pragma once

#include <string>

#include "tessera/benchmark/report.h"
#include "tessera/benchmark/step.h"

namespace tessera::benchmark {

struct MeasuredStep {
  Circumstances around;
  std::string model;                // "llama, 34.1M parameters"
  std::string mesh;                 // as DeviceMesh describes itself
  std::string compute;              // "fp32"
  int64_t samples = 0, tokens = 0;  // of a step, of a sample
  StepTimes times;                  // of rank 0
  double tokens_per_s() const {
    return static_cast<double>(samples * tokens) / times.step.median;
  }
};

std::string step_text(const MeasuredStep& step);
std::string step_json(const MeasuredStep& step);
std::string step_picture(const MeasuredStep& step);

}  // namespace tessera::benchmark

// Which rank the others wait for: what each worked in a step, beside the ranks
// of its stage, which do the same work.
//
// Work is what the computing thread did itself: its spans without what they
// waited for (monitor/timeline.h). A rank is a straggler where in most of
// kSteps steps it worked kTimes as long as the lower median of its stage, and
// the difference is a good part of its step. A stage of one rank has nobody
// beside it. Unlike shares of work look alike: experts that are chosen more
// often, mesh.speeds that are not so; but for those of batch.uneven, where only
// ranks of as many samples are compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/monitor/span.h"
#include "tessera/monitor/step_record.h"
#include "tessera/train/news.h"

namespace tessera::train {

class StragglerWatch {
 public:
  static constexpr int64_t kSteps = 10, kMost = 9;
  static constexpr double kTimes = 4.0 / 3;  // as long as the others
  static constexpr double kPartOfStep = 0.05;

  // `rows`: samples, by data-parallel rank; none: all have as many.
  StragglerWatch(const mesh::DeviceMesh& mesh, int64_t rank,
                 const std::vector<int64_t>& rows = {});

  // seconds: (ranks, kinds) of a step. Fills in the record's part.
  void add(const at::Tensor& seconds, monitor::StepRecord& record);
  // That this rank has become a straggler, or is none any longer.
  std::optional<News> take_news() { return std::exchange(news_, {}); }
  // In seconds of the last step, by rank; none where there is one rank.
  const std::vector<double>& works() const { return works_; }
  // Since the start, by rank; none where there is one rank.
  const std::vector<monitor::RankWork>& ranks() const { return ranks_; }

 private:
  void compare(const std::vector<monitor::SecondsByKind>& seconds);
  void judge();
  std::string straggler_text() const;

  const mesh::DeviceMesh mesh_;
  const int64_t rank_;
  std::vector<int64_t> beside_;  // those with the same work, this one too
  std::vector<double> works_;
  std::vector<monitor::RankWork> ranks_;
  int64_t steps_ = 0, slow_steps_ = 0;  // of kSteps
  // Of these steps: this rank's seconds by kind, those of the others at their
  // median, and the whole step.
  monitor::SecondsByKind mine_{}, theirs_{};
  double step_s_ = 0;
  bool is_straggler_ = false;
  std::optional<News> news_;
};

}  // namespace tessera::train

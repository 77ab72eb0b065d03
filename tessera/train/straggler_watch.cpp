#include "tessera/train/straggler_watch.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tessera/core/host.h"
#include "tessera/train/median.h"

namespace tessera::train {

using monitor::SecondsByKind;
using monitor::SpanKind;

namespace {

// On the computing thread, but for what it waits for.
constexpr std::array kWork = {SpanKind::kForward,   SpanKind::kBackward,
                              SpanKind::kRecompute, SpanKind::kLoss,
                              SpanKind::kOptimizer, SpanKind::kNorm,
                              SpanKind::kLoad};

double at(const SecondsByKind& seconds, SpanKind kind) {
  return seconds[static_cast<size_t>(kind)];
}

double work_in(const SecondsByKind& seconds) {
  return std::accumulate(
      kWork.begin(), kWork.end(), 0.0,
      [&](double sum, SpanKind kind) { return sum + at(seconds, kind); });
}

std::vector<SecondsByKind> rows_of(const at::Tensor& seconds) {
  const at::Tensor whole = seconds.contiguous();
  std::vector<SecondsByKind> rows(whole.size(0));
  const auto* next = whole.const_data_ptr<double>();
  for (SecondsByKind& row : rows) {
    std::copy_n(next, row.size(), row.begin());
    next += row.size();
  }
  return rows;
}

}  // namespace

StragglerWatch::StragglerWatch(const mesh::DeviceMesh& mesh, int64_t rank,
                               const std::vector<int64_t>& rows)
    : mesh_(mesh), rank_(rank) {
  if (mesh.world_size() == 1) return;
  const auto work_of = [&](int64_t of) {
    const mesh::Coord coord = mesh.coord_of(of);
    return std::pair(coord[mesh::Axis::kPp],
                     rows.empty() ? 0 : rows.at(mesh.data_rank_of(coord)));
  };
  for (int64_t other = 0; other < mesh.world_size(); ++other) {
    ranks_.push_back({.rank = other});
    if (work_of(other) == work_of(rank)) beside_.push_back(other);
  }
}

void StragglerWatch::add(const at::Tensor& seconds,
                         monitor::StepRecord& record) {
  if (ranks_.empty()) return;
  const std::vector<SecondsByKind> rows = rows_of(seconds);
  works_.clear();
  for (monitor::RankWork& of : ranks_) {
    const SecondsByKind& row = rows[of.rank];
    works_.push_back(work_in(row));
    of.work_s += works_.back();
    of.wait_s += at(row, SpanKind::kWait);
  }
  const auto slowest = std::ranges::max_element(works_);
  record.slowest_rank = slowest - works_.begin();
  record.work_max_s = *slowest;
  record.work_s = std::accumulate(works_.begin(), works_.end(), 0.0) /
                  static_cast<double>(works_.size());
  ++ranks_[*record.slowest_rank].slowest_in;
  if (beside_.size() > 1) compare(rows);
}

void StragglerWatch::compare(const std::vector<SecondsByKind>& seconds) {
  std::vector<double> beside;
  for (const int64_t rank : beside_) beside.push_back(works_[rank]);
  if (works_[rank_] > kTimes * lower_median(beside)) ++slow_steps_;
  step_s_ += works_[rank_] + at(seconds[rank_], SpanKind::kWait);
  for (const SpanKind kind : kWork) {
    const auto i = static_cast<size_t>(kind);
    std::vector<double> of_kind;
    for (const int64_t rank : beside_) of_kind.push_back(seconds[rank][i]);
    mine_[i] += seconds[rank_][i];
    theirs_[i] += lower_median(std::move(of_kind));
  }
  if (++steps_ == kSteps) judge();
}

void StragglerWatch::judge() {
  const double more = work_in(mine_) - work_in(theirs_);
  const bool was = std::exchange(
      is_straggler_, slow_steps_ >= kMost && more > kPartOfStep * step_s_);
  if (is_straggler_ && !was) {
    news_ = {true, straggler_text()};
  } else if (was && !is_straggler_) {
    news_ = {false, c10::str("stragglers: over the last ", kSteps,
                             " steps this rank kept up with the others")};
  }
  steps_ = slow_steps_ = 0;
  mine_ = theirs_ = {};
  step_s_ = 0;
}

std::string StragglerWatch::straggler_text() const {
  const auto excess = [&](SpanKind kind) {
    return at(mine_, kind) - at(theirs_, kind);
  };
  const SpanKind most = *std::ranges::max_element(kWork, {}, excess);
  const double mine = work_in(mine_) / kSteps;
  const double theirs = work_in(theirs_) / kSteps;
  return c10::str(
      "stragglers: over the last ", kSteps, " steps this rank (",
      mesh_.describe(rank_), ", on ", host_name(), ") worked ", mine,
      " s a step, the ranks beside it ", theirs, " s: ", mine / theirs,
      " times as long, most of it in '", name_of(most),
      "'. They wait for it. Other load on its cores, or a processor that is "
      "slower or throttled, does this; mesh.measure_speeds gives a slow rank "
      "less to do.");
}

}  // namespace tessera::train

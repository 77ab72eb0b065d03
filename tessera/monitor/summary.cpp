#include "tessera/monitor/summary.h"

#include <cmath>

#include "tessera/core/files.h"
#include "tessera/monitor/detail/json_text.h"

namespace tessera::monitor {

Summary::Summary(const RunInfo& info)
    : info_(info),
      started_(std::chrono::steady_clock::now()),
      best_valid_loss_(info.best_valid_loss) {}

void Summary::validated_at_start(const Validation& validation) {
  valid_loss_at_start_ = validation.loss;
}

void Summary::step(const StepRecord& record) {
  if (!first_loss_) first_loss_ = record.loss;
  last_ = record;
  ++steps_run_;
  if (record.was_skipped) ++skipped_steps_;
  tokens_ += record.tokens;
  step_seconds_ += record.step_s;
  mem_peak_mib_ = std::max(mem_peak_mib_, record.mem_peak_mib);
  if (!record.validation) return;
  last_valid_loss_ = record.validation->loss;
  best_valid_loss_ =  // of those that are numbers
      std::fmin(best_valid_loss_.value_or(*last_valid_loss_),
                *last_valid_loss_);
}

void Summary::close(const RunEnd& end) {
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - started_;
  std::optional<double> rate, last_loss;
  if (step_seconds_ > 0) rate = static_cast<double>(tokens_) / step_seconds_;
  if (last_) last_loss = last_->loss;
  std::vector<detail::JsonText> traffic;
  for (const GroupTraffic& of : end.traffic) {
    traffic.push_back(detail::JsonText()
                          .text("group", of.group)
                          .text("verb", of.verb)
                          .number("calls", of.calls)
                          .number("bytes", of.bytes)
                          .number("seconds", of.seconds));
  }
  std::vector<detail::JsonText> links;
  for (const LinkSpeed& link : end.links) {
    links.push_back(detail::JsonText()
                        .number("from", link.from)
                        .number("to", link.to)
                        .number("latency_us", link.latency_us)
                        .number("gbps", link.gbps));
  }
  std::vector<detail::JsonText> ranks;
  for (const RankWork& of : end.ranks) {
    ranks.push_back(detail::JsonText()
                        .number("rank", of.rank)
                        .number("work_s", of.work_s)
                        .number("wait_s", of.wait_s)
                        .number("slowest_in", of.slowest_in)
                        .number("mem_peak_mib", of.mem_peak_mib));
  }
  detail::JsonText json;
  json.text("name", info_.name)
      .text("reason", end.reason)
      .number("exit_code", int64_t{end.exit_code})
      .text("message", end.message)
      .number("world_size", info_.world_size)
      .number("steps", last_ ? last_->step : info_.first_step)
      .number("total_steps", info_.total_steps)
      .number("steps_run", steps_run_)
      .number("skipped_steps", skipped_steps_)
      .number("rewinds", end.rewinds)
      .number("tokens", tokens_)
      .number("seconds", seconds.count())
      .number("tokens_per_s", rate)
      .number("first_loss", first_loss_)
      .number("last_loss", last_loss)
      .number("valid_loss_at_start", valid_loss_at_start_)
      .number("last_valid_loss", last_valid_loss_)
      .number("best_valid_loss", best_valid_loss_)
      .number("mem_peak_mib", mem_peak_mib_)
      .number("peak_tflops", end.peak_tflops)
      .objects("communication", traffic)
      .objects("links", links)
      .objects("ranks", ranks);
  write_file_atomic(info_.folder + "/summary.json", json.str() + "\n");
}

}  // namespace tessera::monitor

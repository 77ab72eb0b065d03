#include "tessera/monitor/fields.h"

namespace tessera::monitor {
namespace {

template <auto member>
std::optional<double> of(const StepRecord& record) {
  using Member = decltype(member);
  if constexpr (std::is_same_v<Member, int64_t StepRecord::*>) {
    return static_cast<double>(record.*member);
  } else if constexpr (std::is_same_v<Member,
                                      std::optional<int64_t> StepRecord::*>) {
    if (!(record.*member)) return std::nullopt;
    return static_cast<double>(*(record.*member));
  } else {
    return record.*member;
  }
}

std::optional<double> valid_loss(const StepRecord& record) {
  if (!record.validation) return std::nullopt;
  return record.validation->loss;
}

std::optional<double> sample_s(const StepRecord& record) {
  if (!record.sample) return std::nullopt;
  return record.sample->seconds;
}

}  // namespace

const std::vector<Field>& fields() {
  using R = StepRecord;
  constexpr auto kAlways = Field::kAlways;
  constexpr auto kIfKnown = Field::kIfKnown;
  constexpr bool kWhole = true;
  static const std::vector<Field> all = {
      {"step", of<&R::step>, kAlways, nullptr, 1, kWhole},
      {"loss", of<&R::loss>, kAlways, "loss_metrics/global_avg_loss"},
      {"grad_norm", of<&R::grad_norm>, kAlways, "grad_norm"},
      {"lr", of<&R::lr>, kAlways, "lr"},
      {"tokens", of<&R::tokens>, kAlways, nullptr, 1, kWhole},
      {"step_s", of<&R::step_s>, kAlways, "time_metrics/end_to_end(s)"},
      {"tokens_per_s", of<&R::tokens_per_s>, kAlways},
      {"tflops", of<&R::tflops>, kAlways, "tflops"},
      {"mfu", of<&R::mfu>, kAlways, "mfu(%)", 100},
      {"mem_peak_mib", of<&R::mem_peak_mib>, kAlways, "memory/max_active(GiB)",
       1.0 / 1024},
      {"comm_s", of<&R::comm_s>, kAlways, "time_metrics/communication(s)"},
      {"comm_bytes", of<&R::comm_bytes>, kAlways, nullptr, 1, kWhole},
      {"comm_latency_us", of<&R::comm_latency_us>, kAlways},
      {"comm_gbps", of<&R::comm_gbps>, kAlways},
      {"bubble", of<&R::bubble>, kAlways, "bubble"},
      {"exposed_comm_s", of<&R::exposed_comm_s>, kIfKnown,
       "time_metrics/exposed_communication(s)"},
      {"work_s", of<&R::work_s>, kIfKnown, "time_metrics/work(s)"},
      {"work_max_s", of<&R::work_max_s>, kIfKnown,
       "time_metrics/work_of_slowest(s)"},
      {"slowest_rank", of<&R::slowest_rank>, kIfKnown, nullptr, 1, kWhole},
      {"loss_scale", of<&R::loss_scale>, kIfKnown, "loss_scale"},
      {"aux_loss", of<&R::aux_loss>, kIfKnown, "aux_loss"},
      {"mtp_loss", of<&R::mtp_loss>, kIfKnown, "mtp_loss"},
      {"valid_loss", valid_loss, kIfKnown, kValidLossTag},
      {"sample_s", sample_s, kIfKnown, "time_metrics/sample(s)"},
      {"checkpoint_failed", of<&R::checkpoint_failed>, kIfKnown,
       "checkpoint_failed", 1, kWhole},
  };
  return all;
}

const std::vector<ListField>& list_fields() {
  using R = StepRecord;
  static const std::vector<ListField> all = {
      {"work_s_by_rank", &R::work_s_by_rank},
      {"comm_s_by_rank", &R::comm_s_by_rank},
      {"exposed_comm_s_by_rank", &R::exposed_comm_s_by_rank},
      {"comm_bytes_by_rank", &R::comm_bytes_by_rank},
      {"bubble_by_rank", &R::bubble_by_rank},
      {"mem_peak_mib_by_rank", &R::mem_peak_mib_by_rank},
      {"expert_load", &R::expert_load},
      {"expert_imbalance", &R::expert_imbalance},
      {"expert_dropped", &R::expert_dropped},
      {"routing_entropy", &R::routing_entropy},
  };
  return all;
}

}  // namespace tessera::monitor

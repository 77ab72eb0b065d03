#include "tessera/train/expert_watch.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <vector>

namespace tessera::train {
namespace {

std::vector<double> to_vector(const at::Tensor& numbers) {
  const at::Tensor flat = numbers.contiguous();
  const auto* first = flat.const_data_ptr<double>();
  return {first, first + flat.numel()};
}

// The number in the model of the n-th layer with experts.
int64_t layer_of(const models::ModelConfig& model, int64_t n) {
  int64_t layer = 0;
  while (!model.has_experts(layer) || n-- > 0) ++layer;
  return layer;
}

}  // namespace

void ExpertWatch::add(const at::Tensor& counts, monitor::StepRecord& record) {
  const int64_t experts = model_.moe.experts;
  const at::Tensor rows = counts.narrow(1, 0, experts);
  const at::Tensor dropped = counts.select(1, experts);
  const auto tokens = static_cast<double>(tokens_);
  const double choices = model_.moe.experts_choose()
                             ? tokens
                             : tokens * static_cast<double>(model_.moe.top_k);
  record.expert_load = to_vector(rows.sum(0) / rows.sum());
  record.expert_imbalance =
      to_vector(std::get<0>(rows.max(1)) * experts / rows.sum(1));
  record.expert_dropped = to_vector(dropped / choices);
  record.routing_entropy = to_vector(counts.select(1, experts + 1) / tokens);
  rows_ = rows_.defined() ? rows_ + rows : rows.clone();
  ++steps_;
}

std::string ExpertWatch::warning() {
  if (steps_ < kSteps) return "";
  const at::Tensor shares =
      rows_ * model_.moe.experts / rows_.sum(1, /*keepdim=*/true);
  rows_ = at::Tensor();
  steps_ = 0;
  const auto least = shares.argmin().item<int64_t>();
  const auto share = shares.view({-1})[least].item<double>();
  if (has_warned_ || share >= kShare) return "";
  has_warned_ = true;
  const int64_t starving = (shares < kShare).sum().item<int64_t>();
  const models::MoeConfig& moe = model_.moe;
  return c10::str(
      "experts: over the last ", kSteps, " steps expert ", least % moe.experts,
      " of layer ", layer_of(model_, least / moe.experts), " got ", share,
      " of its even share of tokens",
      starving > 1 ? c10::str(", and ", starving - 1, " others starve too")
                   : "",
      ". It hardly learns. Raise model.moe.aux_loss (", moe.aux_loss, ")",
      moe.bias_balance
          ? c10::str(" or model.moe.bias_rate (", moe.bias_rate, ").")
          : " or set model.moe.bias_balance.");
}

}  // namespace tessera::train

#include "tessera/wrappers/moe.h"

#include <ATen/ATen.h>

#include <string>

#include "tessera/core/error.h"
#include "tessera/nn/grouped_linear.h"
#include "tessera/nn/wide_type.h"
#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera {

using mesh::Axis;

namespace {

void check(int64_t experts, int64_t k, const mesh::DeviceMesh& mesh) {
  TS_CHECK_CONFIG(experts >= 1 && k >= 1 && k <= experts, "MoE: k is ", k,
                  " of ", experts, " experts: 1 to all of them.");
  const int64_t ep = mesh.degree(Axis::kEp);
  TS_CHECK_CONFIG(experts % ep == 0, "MoE: ", experts,
                  " experts do not divide by ep ", ep,
                  ". Nearest: ", experts / ep * ep > 0 ? experts / ep * ep : ep,
                  " or ", (experts / ep + 1) * ep, ".");
  TS_CHECK_CONFIG(mesh.degree(Axis::kEtp) == 1 && mesh.degree(Axis::kTp) == 1,
                  "MoE: ", mesh.describe(),
                  ": an expert of one's own is whole on its rank, and ranks "
                  "see other tokens: etp and tp are 1.");
}

}  // namespace

namespace wrappers {

LocalExperts::LocalExperts(int64_t experts, int64_t ranks, int64_t rank,
                           const std::function<Expert()>& make)
    : ranks_(ranks), first_(experts / ranks * rank) {
  for (int64_t number = 0; number < experts; ++number) {
    Expert expert = make();
    if (number / (experts / ranks) != rank) continue;
    register_module(std::to_string(experts_.size()), expert.module);
    if (experts_.empty()) {
      for (const auto& each : expert.module->parameters()) {
        parameters_of_one_ += each.numel();
      }
    }
    experts_.push_back(std::move(expert));
  }
}

at::Tensor LocalExperts::forward(const at::Tensor& rows,
                                 const std::vector<int64_t>& splits) {
  const auto rows_of = rows.split_with_sizes(splits);
  std::vector<at::Tensor> outputs;
  for (size_t e = 0; e < experts_.size(); ++e) {
    outputs.push_back(experts_[e].forward(rows_of[e]));
  }
  return at::cat(outputs);
}

}  // namespace wrappers

MoEImpl::MoEImpl(int64_t hidden, int64_t experts, int64_t k,
                 const std::function<wrappers::Expert()>& make,
                 const mesh::DeviceMesh& mesh, comm::Communicator& ranks)
    : num_experts_(experts),
      k_(k),
      peers_(mesh.peers(ranks.rank(), {Axis::kEp})),
      ranks_(ranks),
      gate_(torch::nn::LinearOptions(hidden, experts).bias(false)) {
  check(experts, k, mesh);
  register_module("gate", gate_);
  experts_ = register_module("experts",
                             std::make_shared<wrappers::LocalExperts>(
                                 experts, mesh.degree(Axis::kEp),
                                 mesh.coord_of(ranks.rank())[Axis::kEp], make));
}

MoEOutput MoEImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.flatten(0, -2);
  const at::Tensor p =
      at::softmax(gate_->forward(tokens), /*dim=*/-1, nn::wide_type(tokens));
  const auto [best, experts] = at::topk(p, k_);
  const at::Tensor weights =
      k_ == 1 ? best : best / best.sum(-1, /*keepdim=*/true);

  const at::Tensor picked = experts.flatten();
  // Stable: rows for one expert keep their order.
  const at::Tensor order = at::argsort(picked, /*stable=*/true, /*dim=*/0,
                                       /*descending=*/false);
  const at::Tensor token = order.floor_divide(k_);
  const at::Tensor counts = at::zeros({num_experts_}, picked.options())
                                .scatter_add_(0, picked, at::ones_like(picked));
  const at::Tensor rows = run(tokens.index_select(0, token), counts);
  const at::Tensor weighted = rows * weights.flatten()
                                         .index_select(0, order)
                                         .to(rows.scalar_type())
                                         .unsqueeze(1);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = rows.size(1);
  const at::Tensor output =
      at::zeros({tokens.size(0), rows.size(1)}, rows.options())
          .index_add(0, token, weighted)
          .view(shape);
  return {output, balance(p, experts, x.size(0)), counts};
}

at::Tensor MoEImpl::run(const at::Tensor& rows, const at::Tensor& counts) {
  const auto here = [this](const at::Tensor& of,
                           const std::vector<int64_t>& splits) {
    return experts_->forward(of, splits);
  };
  if (peers_.size() == 1) {
    return here(rows, nn::RowGroups(counts, rows.size(0)).sizes());
  }
  // Not in the constructor, which ranks that are threads run in turn.
  if (!exchange_) {
    exchange_ = ranks_.make_group(peers_, mesh::name_of(Axis::kEp));
  }
  return parallel::expert::dispatch(rows, counts, here, *exchange_);
}

at::Tensor MoEImpl::balance(const at::Tensor& probabilities,
                            const at::Tensor& picked, int64_t samples) const {
  if (picked.numel() == 0) return probabilities.sum();  // 0
  const at::Tensor of_samples = picked.reshape({samples, -1});
  const at::Tensor p = probabilities.view({samples, -1, num_experts_});
  const at::Tensor ones = at::ones({1}, p.options()).expand_as(of_samples);
  const at::Tensor rows =
      at::zeros({samples, num_experts_}, p.options().requires_grad(false))
          .scatter_add_(1, of_samples, ones);
  const at::Tensor shares = rows / static_cast<double>(of_samples.size(1));
  return (shares * p.mean(1)).sum() *
         (static_cast<double>(num_experts_) / static_cast<double>(samples));
}

}  // namespace tessera

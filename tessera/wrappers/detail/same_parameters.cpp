#include "tessera/wrappers/detail/same_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/wrappers/detail/heard_memory.h"
#include "tessera/wrappers/detail/module_shards.h"
#include "tessera/wrappers/moe.h"
#include "tessera/wrappers/sync_batch_norm.h"

namespace tessera::wrappers {
namespace {

// Of names, shapes, dtypes and what is trained: equal on ranks with the same
// module.
int64_t fingerprint(const std::vector<NamedParameter>& parameters) {
  std::string text;
  for (const auto& [name, parameter] : parameters) {
    text += c10::str(name, parameter.sizes(), parameter.scalar_type(),
                     parameter.requires_grad() ? " trains;" : ";");
  }
  return static_cast<int64_t>(hash64(text));
}

// Whether some of these ranks but one are of the group.
bool are_of(const std::vector<int64_t>& ranks, const comm::Group& group) {
  return std::ranges::count_if(ranks, [&](int64_t rank) {
           return std::ranges::find(group.ranks(), rank) != group.ranks().end();
         }) > 1;
}

void require_no_shards(const std::string& name, const torch::nn::Module& module,
                       const comm::Group& group) {
  TS_CHECK_CONFIG(!are_of(ranks_with_shards(module), group),
                  "data parallel: ranks of the group have other shards of \"",
                  name, "\", a ", module.name(),
                  ", and one rank's would take their place. fully_shard() has "
                  "given every rank the first one's values, and averages "
                  "gradients by itself: leave this out, or give values while "
                  "what gather() gives lives.");
}

}  // namespace

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    found.push_back({item.key(), item.value()});
  }
  return found;
}

std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& each : tensors) {
    if (seen.insert(each.unsafeGetTensorImpl()).second) found.push_back(each);
  }
  return found;
}

std::vector<at::Tensor> distinct_parameters(
    const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return distinct(all);
}

void require_no_parts(torch::nn::Module& module, const comm::Group& group) {
  constexpr const char* kWayOut =
      " Make the group of ranks that hold the same, or use fully_shard(), "
      "which knows which do (zero_stage 0 shards nothing).";
  for (const auto& [name, moe] : mixtures_of(module)) {
    TS_CHECK_CONFIG(!are_of(moe->peers(), group),
                    "data parallel: ranks of the group have other experts of "
                    "the MoE \"",
                    name, "\".", kWayOut);
  }
  for (const auto& item : module.named_parameters()) {
    const auto share = known_share(item.value());
    TS_CHECK_CONFIG(!share || !are_of(share->ranks, group),
                    "data parallel: ranks of the group have other shares of ",
                    item.key(), ", which is cut along tp.", kWayOut);
  }
  require_no_shards("", module, group);
  for (const auto& each : module.named_modules("", /*include_self=*/false)) {
    require_no_shards(each.key(), *each.value(), group);
  }
}

void require_whole_gradients(torch::nn::Module& module) {
  for (const auto& [name, moe] : mixtures_of(module)) {
    TS_CHECK_CONFIG(moe->has_whole_gradients(),
                    "data parallel: experts of the MoE \"", name,
                    "\" lie on ranks ", at::IntArrayRef(moe->peers()),
                    ", which see other tokens, and no mean over ranks that "
                    "hold the same adds up their gradients. Use "
                    "fully_shard(), with zero_stage 0 where nothing else is "
                    "to be shared out.");
  }
}

void require_joinable(torch::nn::Module& module) {
  for (const auto& each : module.modules()) {
    TS_CHECK(each->as<SyncBatchNormImpl>() == nullptr,
             "join: the module has a SyncBatchNorm, for whose statistics every "
             "rank goes forward as often as the others: a rank without data "
             "cannot. Give every rank as many batches, or use BatchNorm.");
  }
  for (const auto& [name, moe] : mixtures_of(module)) {
    TS_CHECK(!moe->has_biases(),
             "join: the module has a MoE with biases, which move by the load "
             "of all ranks: one without data cannot tell its own. Give every "
             "rank as many batches, or use a bias_rate of 0.");
  }
}

void require_same_parameters(const std::vector<NamedParameter>& parameters,
                             comm::Group& group) {
  at::Tensor mine = at::tensor(
      {static_cast<int64_t>(parameters.size()), fingerprint(parameters)},
      at::kLong);
  at::Tensor all = at::empty({group.size() * 2}, at::kLong);
  group.all_gather(all, mine).synchronize();
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const at::Tensor other = all.narrow(0, 2 * rank, 2);
    TS_CHECK(at::equal(mine, other), "data parallel: the module of rank ",
             group.ranks()[rank], " is another one: ", other[0].item<int64_t>(),
             " parameters against ", parameters.size(),
             " here, or other names, shapes or dtypes, or others that are "
             "frozen (requires_grad). Build the same module on every rank, and "
             "freeze the same in it.");
  }
}

void broadcast_all(const std::vector<at::Tensor>& tensors, comm::Group& group,
                   int64_t root) {
  at::NoGradGuard no_grad;
  std::vector<comm::Work> pending;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (const at::Tensor& tensor : tensors) {
    at::Tensor data = tensor.detach();
    if (!data.is_contiguous()) {
      copies.emplace_back(data, data.contiguous());
      data = copies.back().second;
    }
    pending.push_back(group.broadcast(data, root));
  }
  for (auto& work : pending) work.wait();
  for (auto& [to, from] : copies) to.copy_(from);
}

}  // namespace tessera::wrappers

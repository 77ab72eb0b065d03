#include "tessera/wrappers/moe.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tessera/comm/autograd.h"
#include "tessera/core/error.h"
#include "tessera/mesh/layout.h"
#include "tessera/nn/expert_rows.h"
#include "tessera/nn/grouped_linear.h"
#include "tessera/nn/wide_type.h"
#include "tessera/parallel/expert/expert_parallel.h"

namespace tessera {

using mesh::Axis;

namespace {

void check_mesh(int64_t experts, const mesh::DeviceMesh& mesh,
                const comm::Communicator& ranks) {
  TS_CHECK_CONFIG(mesh.world_size() == ranks.world_size(),
                  "MoE: the mesh is of ", mesh.world_size(), " ranks (",
                  mesh.describe(), "), the communicator of ",
                  ranks.world_size(), ".");
  const int64_t ep = mesh.degree(Axis::kEp);
  TS_CHECK_CONFIG(experts % ep == 0, "MoE: ", experts,
                  " experts do not divide by ep ", ep,
                  ". Nearest: ", experts / ep * ep > 0 ? experts / ep * ep : ep,
                  " or ", (experts / ep + 1) * ep, ".");
  TS_CHECK_CONFIG(mesh.degree(Axis::kCp) == 1, "MoE: ", mesh.describe(),
                  ": a rank has whole samples, and cp is 1.");
}

// The router that they ask for, once all are checked.
nn::RouterOptions checked(int64_t experts, int64_t k, const MoEOptions& options,
                          const mesh::DeviceMesh& mesh,
                          const comm::Communicator& ranks) {
  check_mesh(experts, mesh, ranks);
  TS_CHECK_CONFIG(experts >= 1 && k >= 1 && k <= experts, "MoE: k is ", k,
                  " of ", experts, " experts: 1 to all of them.");
  const int64_t groups = options.groups, best = options.top_groups;
  TS_CHECK_CONFIG(groups >= 1 && experts % groups == 0, "MoE: ", experts,
                  " experts in ", groups, " groups: all have as many.");
  TS_CHECK_CONFIG(best >= 1 && best <= groups && k <= experts / groups * best,
                  "MoE: the best ", best, " of ", groups, " groups have ",
                  experts / groups * best, " experts, and k is ", k,
                  ". Raise top_groups, up to all groups.");
  TS_CHECK_CONFIG(std::isfinite(options.scale) && options.scale > 0,
                  "MoE: weights are scaled by ", options.scale,
                  "; scale is above 0.");
  TS_CHECK_CONFIG(
      std::isfinite(options.capacity_factor) && options.capacity_factor >= 0,
      "MoE: capacity_factor is ", options.capacity_factor,
      "; it is above 0, or 0, which drops nothing.");
  TS_CHECK_CONFIG(std::isfinite(options.bias_rate) && options.bias_rate >= 0,
                  "MoE: bias_rate is ", options.bias_rate,
                  "; it is above 0, or 0, without biases.");
  return {.experts = experts,
          .top_k = k,
          .score = options.score,
          .normalize = options.normalize.value_or(k > 1),
          .scale = options.scale,
          .groups = groups,
          .top_groups = best};
}

int64_t num_parameters_of(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& each : module.parameters()) count += each.numel();
  return count;
}

}  // namespace

namespace wrappers {

LocalExperts::LocalExperts(int64_t experts, std::vector<int64_t> peers,
                           int64_t rank, const ExpertFn& make)
    : peers_(std::move(peers)) {
  const int64_t here = experts / ranks();
  const int64_t place = std::ranges::find(peers_, rank) - peers_.begin();
  first_ = here * place;
  for (int64_t number = 0; number < experts; ++number) {
    Expert expert = make();
    if (number / here != place) continue;
    register_module(std::to_string(experts_.size()), expert.module);
    if (experts_.empty())
      parameters_of_one_ = num_parameters_of(*expert.module);
    experts_.push_back(std::move(expert));
  }
}

void LocalExperts::check(const char* who, const std::string& name,
                         const mesh::DeviceMesh& mesh, int64_t rank) const {
  const auto others = mesh.peers(rank, {Axis::kEp});
  TS_CHECK_CONFIG(peers_ == others, who, ": \"", name,
                  "\" has its experts on ranks ", at::IntArrayRef(peers_),
                  ", which along ep of the mesh (", mesh.describe(), ") are ",
                  at::IntArrayRef(others), ". Give both the same mesh.");
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
                 const wrappers::ExpertFn& expert_fn,
                 const mesh::DeviceMesh& mesh, comm::Communicator& ranks,
                 const MoEOptions& options)
    : router_(checked(experts, k, options, mesh, ranks)),
      capacity_factor_(options.capacity_factor),
      bias_rate_(options.bias_rate),
      pieces_({ranks.rank()}),
      data_(mesh.peers(ranks.rank(), {Axis::kDpReplicate, Axis::kDpShard})),
      ranks_(ranks),
      gate_(torch::nn::LinearOptions(hidden, experts).bias(false)) {
  if (mesh.degree(Axis::kEp) > 1 && mesh.degree(Axis::kEtp) == 1) {
    pieces_ = mesh.peers(ranks.rank(), {Axis::kTp});
  }
  register_module("gate", gate_);
  experts_ = register_module("experts",
                             std::make_shared<wrappers::LocalExperts>(
                                 experts, mesh.peers(ranks.rank(), {Axis::kEp}),
                                 ranks.rank(), expert_fn));
  if (options.shared) {
    shared_ = (*options.shared)();
    register_module("shared", shared_.module);
    shared_parameters_ = num_parameters_of(*shared_.module);
  }
  if (bias_rate_ > 0) {
    bias_ = register_buffer("score_bias", at::zeros({experts}));
  }
}

int64_t MoEImpl::count(int64_t experts) const {
  return gate_->options.in_features() * router_.experts + shared_parameters_ +
         experts * experts_->parameters_of_one();
}

// Not in the constructor, which ranks that are threads run in turn.
comm::Group& MoEImpl::group(comm::Group*& of, const std::vector<int64_t>& peers,
                            const char* name) {
  if (!of) of = ranks_.make_group(peers, name);
  return *of;
}

MoEOutput MoEImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.flatten(0, -2);
  const at::Tensor products = gate_->forward(tokens);
  TS_CHECK(products.size(1) == router_.experts, "MoE: the gate has ",
           products.size(1), " of ", router_.experts,
           " experts on this rank. Leave it out of parallelize()'s plan.");
  const nn::Routing routing = nn::route(products, bias_, router_);
  const at::Tensor counts = nn::counts_of(routing.experts, router_.experts);
  if (bias_.defined() && is_training() && at::GradMode::is_enabled()) {
    load_ = load_.defined() ? load_ + counts : counts.clone();
  }
  const at::Tensor places = places_of(routing.experts, x.size(0));
  at::Tensor output = pieces_.size() > 1
                          ? mixed_in_pieces(tokens, routing.weights, places)
                          : mixed(tokens, routing.weights, places);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = output.size(1);
  output = output.reshape(shape);
  if (shared_.module) output = output + shared_.forward(x);
  return {output, balance(routing, x.size(0)), counts};
}

// Of the k choices of each token the experts that take them; E: none does.
at::Tensor MoEImpl::places_of(const at::Tensor& choices, int64_t samples) {
  const int64_t experts = router_.experts;
  dropped_ = at::zeros({}, choices.options());
  if (capacity_factor_ == 0 || choices.numel() == 0) return choices;
  const int64_t tokens = choices.size(0) / samples;
  const int64_t capacity =
      nn::capacity_of(capacity_factor_, tokens, router_.top_k, experts);
  TS_CHECK(capacity >= 1, "MoE: a capacity_factor of ", capacity_factor_,
           " leaves each of ", experts,
           " experts less than one token of a sample of ", tokens,
           ", with k = ", router_.top_k, ": all would be dropped. Use ",
           static_cast<double>(experts) /
               static_cast<double>(tokens * router_.top_k),
           " or more, or 0, which drops nothing.");
  const at::Tensor kept =
      nn::within_capacity(choices.view({samples, tokens, router_.top_k}),
                          experts, capacity)
          .view_as(choices);
  dropped_ = kept.logical_not().sum();
  return at::where(kept, choices, experts);
}

// Ranks of `pieces_` have the same tokens, and send a piece of them each.
at::Tensor MoEImpl::mixed_in_pieces(const at::Tensor& tokens,
                                    const at::Tensor& weights,
                                    const at::Tensor& places) {
  comm::Group& pieces = group(piece_group_, pieces_, mesh::name_of(Axis::kTp));
  const int64_t whole = tokens.size(0);
  const mesh::Range mine = mesh::chunk_of(whole, pieces.size(), pieces.rank());
  // One after the other, on every rank: so autograd goes back through them.
  const at::Tensor own_tokens = comm::split_with_all_gather(tokens, 0, pieces);
  const at::Tensor own_weights =
      comm::split_with_all_gather(weights, 0, pieces);
  const at::Tensor piece =
      mixed(own_tokens, own_weights, places.narrow(0, mine.begin, mine.size()));
  return comm::all_gather_with_split(piece, 0, pieces, whole);
}

at::Tensor MoEImpl::mixed(const at::Tensor& tokens, const at::Tensor& weights,
                          const at::Tensor& places) {
  const nn::RowOrder order = nn::order_of_rows(places, places.numel());
  const at::Tensor rows = run(
      nn::rows_of_tokens(tokens, order),
      nn::counts_of(places, router_.experts + 1).narrow(0, 0, router_.experts));
  return nn::tokens_of_rows(rows, weights.to(nn::wide_type(rows)), order);
}

// Of the first rows: what is behind those that are counted goes nowhere.
at::Tensor MoEImpl::run(const at::Tensor& rows, const at::Tensor& counts) {
  const auto here = [this](const at::Tensor& of,
                           const std::vector<int64_t>& splits) {
    return experts_->forward(of, splits);
  };
  if (peers().size() > 1) {
    return parallel::expert::dispatch(
        rows, counts, here,
        group(exchange_, peers(), mesh::name_of(Axis::kEp)));
  }
  const bool drops = capacity_factor_ > 0;
  const nn::RowGroups groups(
      counts, drops ? std::nullopt : std::make_optional(rows.size(0)));
  return here(drops ? rows.narrow(0, 0, groups.rows()) : rows, groups.sizes());
}

at::Tensor MoEImpl::balance(const nn::Routing& routing, int64_t samples) const {
  const int64_t experts = router_.experts;
  if (routing.experts.numel() == 0) return routing.probabilities.sum();  // 0
  const at::Tensor of_samples = routing.experts.reshape({samples, -1});
  const at::Tensor p = routing.probabilities.view({samples, -1, experts});
  const at::Tensor ones = at::ones({1}, p.options()).expand_as(of_samples);
  const at::Tensor chosen =
      at::zeros({samples, experts}, p.options().requires_grad(false))
          .scatter_add_(1, of_samples, ones);
  const at::Tensor shares = chosen / static_cast<double>(of_samples.size(1));
  return (shares * p.mean(1)).sum() *
         (static_cast<double>(experts) / static_cast<double>(samples));
}

// In whole numbers, in Eths of a choice, whose sums over ranks are exact.
void MoEImpl::move_bias() {
  if (!bias_.defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor load =
      load_.defined()
          ? std::exchange(load_, at::Tensor())
          : at::zeros({router_.experts}, bias_.options().dtype(at::kLong));
  if (data_.size() > 1) {
    group(data_group_, data_, "data").all_reduce(load).synchronize();
  }
  const at::Tensor excess = load * router_.experts - load.sum();
  bias_.sub_(excess.sign().to(bias_.scalar_type()), bias_rate_);
}

void MoEImpl::move(const std::function<void()>& module) {
  const at::Tensor kept = bias_.defined() ? bias_.clone() : bias_;
  module();
  if (!kept.defined()) return;
  // By itself: of a module that is being recorded (DeferredInit) the device is
  // not where it will be.
  at::Tensor wide = kept.to(nn::wide_type(bias_));
  if (wide.device() != bias_.device()) wide = wide.to(bias_.device());
  bias_.set_data(wide);
}

void MoEImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  move([&] { Module::to(device, dtype, non_blocking); });
}
void MoEImpl::to(torch::Dtype dtype, bool non_blocking) {
  move([&] { Module::to(dtype, non_blocking); });
}
void MoEImpl::to(torch::Device device, bool non_blocking) {
  move([&] { Module::to(device, non_blocking); });
}

std::vector<std::pair<std::string, MoEImpl*>> wrappers::mixtures_of(
    torch::nn::Module& module) {
  std::vector<std::pair<std::string, MoEImpl*>> found;
  const auto add = [&](const std::string& name, torch::nn::Module& each) {
    if (auto* moe = each.as<MoEImpl>()) found.emplace_back(name, moe);
  };
  add("", module);
  for (const auto& each : module.named_modules("", /*include_self=*/false)) {
    add(each.key(), *each.value());
  }
  return found;
}

void balance_experts(torch::nn::Module& module) {
  for (const auto& [name, moe] : wrappers::mixtures_of(module)) {
    moe->move_bias();
  }
}

void forget_loads(torch::nn::Module& module) {
  for (const auto& [name, moe] : wrappers::mixtures_of(module)) {
    moe->forget_load();
  }
}

}  // namespace tessera

#include "tessera/module_engine/detail/module_updates.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cctype>
#include <sstream>
#include <utility>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/optim/parameter_groups.h"

namespace tessera::detail {

using parallel::data::WholeUpdates;
using wrappers::ParameterShard;

namespace {

// DeepSpeed's rule, but for what Embeddings are called here, and for parameters
// of more dimensions.
bool is_hidden_by_name(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char letter) {
    return static_cast<char>(std::tolower(letter));
  });
  return name.find("embed") == std::string::npos &&
         name.find("lm_head") == std::string::npos;
}

bool is_hidden_matrix(const ParameterShard& shard,
                      const std::vector<std::string>& hidden,
                      const std::set<std::string>& embeddings) {
  if (shard.shape.size() != 2) return false;
  if (hidden.empty()) {
    return !embeddings.contains(shard.name_here) &&
           is_hidden_by_name(shard.name);
  }
  return std::ranges::any_of(hidden, [&](const std::string& glob) {
    return optim::matches(glob, shard.name);
  });
}

// Those of all ranks, on all of them: experts are called otherwise on others.
std::vector<std::string> on_all_ranks(const std::vector<std::string>& names,
                                      comm::Group& world) {
  std::set<std::string> all;
  for (const auto& text : comm::gather_texts(world, c10::Join("\n", names))) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) all.insert(line);
  }
  std::istringstream lines(comm::text_of_rank_0(world, c10::Join("\n", all)));
  std::vector<std::string> found;
  for (std::string line; std::getline(lines, line);) found.push_back(line);
  return found;
}

using Segments = std::vector<optim::FlatSegment>;

void check_names(const Segments& segments, const ModuleSettings& settings,
                 const std::vector<std::string>& hidden, comm::Group& world) {
  const optim::OptimizerConfig& optimizer = settings.config.optimizer;
  const bool whole = settings.config.whole_matrices;
  TS_CHECK_CONFIG(whole || hidden.empty(),
                  "initialize: hidden_matrices are of optimizer.type muon, but "
                  "that is ",
                  optimizer.type, ". Leave them out.");
  if (optimizer.groups.empty() && !whole) return;
  std::vector<std::string> trained, matrices;
  for (const auto& segment : segments) {
    trained.push_back(segment.name);
    if (segment.is_matrix) matrices.push_back(segment.name);
  }
  optim::check_groups(optimizer, on_all_ranks(trained, world));
  if (!whole) return;
  matrices = on_all_ranks(matrices, world);
  for (const auto& glob : hidden) {
    optim::require_match("initialize: a glob of hidden_matrices", glob,
                         matrices);
  }
  TS_CHECK_CONFIG(!matrices.empty(),
                  "initialize: optimizer.type is muon, but the module has no "
                  "parameter of two dimensions that is hidden: whose name has "
                  "neither \"embed\" nor \"lm_head\", and that no Embedding "
                  "looks up. Name them in hidden_matrices, or use AdamW.");
}

}  // namespace

std::set<std::string> embedding_names(const torch::nn::Module& module) {
  std::set<const void*> looked_up;
  for (const auto& each : module.modules()) {
    if (const auto* one = each->as<torch::nn::EmbeddingImpl>()) {
      looked_up.insert(one->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = each->as<torch::nn::EmbeddingBagImpl>()) {
      looked_up.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  std::set<std::string> names;
  for (const auto& parameter : module.named_parameters()) {
    if (looked_up.contains(parameter.value().unsafeGetTensorImpl())) {
      names.insert(parameter.key());
    }
  }
  return names;
}

ModuleUpdates::ModuleUpdates(const std::vector<ParameterShard>& shards,
                             const ModuleSettings& settings,
                             const std::vector<std::string>& hidden,
                             const std::set<std::string>& embeddings,
                             comm::Communicator& ranks) {
  optim::OptimizerConfig config = settings.config.optimizer;
  const bool whole = settings.config.whole_matrices;
  Segments segments;
  std::vector<WholeUpdates::Matrix> matrices;
  for (const auto& shard : shards) {
    if (!shard.parameter.requires_grad()) continue;
    const size_t number = segments.size();
    const bool is_matrix = whole && is_hidden_matrix(shard, hidden, embeddings);
    segments.push_back({.name = shard.name,
                        .parameter = shard.parameter,
                        .gradient = {},
                        .decay = true,
                        .is_matrix = is_matrix});
    if (is_matrix) matrices.push_back({number, shard.unit, shard.layout});
    if (units_.empty() || units_.back().number != shard.unit) {
      units_.push_back({shard.unit, number, 0, false});
    }
    ++units_.back().count;
  }
  check_names(segments, settings, hidden, ranks.world());
  if (whole) {
    at::ScalarType type = segments.front().parameter.scalar_type();
    // The shards are masters, whose type is not what is computed in.
    if (settings.config.updates().dtype == at::kBFloat16) {
      type = at::kBFloat16;
      config.muon.dtype = "bf16";
    }
    whole_ =
        std::make_unique<WholeUpdates>(matrices, settings.mesh, ranks, type);
    for (auto& unit : units_) {
      for (size_t i = unit.first; i < unit.first + unit.count; ++i) {
        unit.gathers |= whole_->gathers(i);
      }
    }
  }
  optimizer_ = optim::make_optimizer(config, std::move(segments));
}

void ModuleUpdates::begin_gather(size_t unit) {
  if (unit >= units_.size() || !units_[unit].gathers) return;
  whole_->begin_gather(
      units_[unit].number, [this](size_t i) { return optimizer_->piece(i); },
      comm::Mode::kAsync);
}

void ModuleUpdates::step(double lr, double gradient_scale) {
  optimizer_->begin_step(gradient_scale);
  begin_gather(0);
  for (size_t i = 0; i < units_.size(); ++i) {
    begin_gather(i + 1);
    const Unit& unit = units_[i];
    if (unit.gathers) whole_->await_gather(unit.number);
    optimizer_->step(lr, unit.first, unit.count, [this](size_t segment) {
      return whole_->whole_of(*optimizer_, segment);
    });
    if (unit.gathers) whole_->free(unit.number);
  }
}

}  // namespace tessera::detail

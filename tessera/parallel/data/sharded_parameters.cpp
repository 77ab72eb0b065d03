#include "tessera/parallel/data/sharded_parameters.h"

#include <utility>

#include "tessera/parallel/data/parameter_storage.h"

namespace tessera::parallel::data {

using mesh::Placement;

// What a rank holds of a bundle.
struct ShardedParameters::Held {
  Held(Bundle of, const std::optional<GradientOptions>& options,
       const at::TensorOptions& full, const KeptMemory& memory,
       comm::Group& shards, comm::Group& peers, SentCopies& sent,
       const program::Versions& versions)
      : bundle(std::move(of)),
        parameters(bundle, shards, sent, full, memory, versions.parameters) {
    if (!options || bundle.is_frozen) return;
    for (int64_t i = 0; i < versions.gradients; ++i) {
      if (i > 0) forget_gradients();
      gradients.push_back(make_gradients(bundle, *options, shards, peers));
    }
    for (const at::Tensor& own : gradients.front()->shards()) {
      local.push_back(versions.gradients == 1 ? own : pointer_to(own));
    }
  }
  // Else the next ones would take over what lies there.
  void forget_gradients() const {
    for (const auto& parameter : bundle.parameters) {
      at::Tensor tensor = parameter.tensor;
      tensor.mutable_grad() = at::Tensor();
    }
  }
  // `version`: counted from the first of all.
  void for_gradients(int64_t version, const auto& act) {
    if (!gradients.empty()) act(*gradients[version % gradients.size()]);
  }
  // Those of this version are the step's.
  void point_gradients(int64_t version) {
    if (gradients.size() < 2) return;
    const auto& shards = gradients[version % gradients.size()]->shards();
    for (size_t i = 0; i < local.size(); ++i) point(local[i], shards[i]);
  }
  at::Tensor gradient(size_t i) const {
    return gradients.empty() ? at::Tensor() : local[i];
  }

  const Bundle bundle;
  ParameterStorage parameters;
  std::vector<std::unique_ptr<GradientStorage>> gradients;  // by version
  std::vector<at::Tensor> local;                            // of the step
};

void set_layout(const nn::Parameter& parameter, int64_t stage) {
  const Placement own =
      stage == 0 ? Placement::replicate_summed()
                 : Placement::shard(parameter.spec->layout.data_dim());
  mesh::Layout& layout = parameter.spec->layout;
  layout = layout.with(layout.data_axis(), own);
  layout = layout.with(layout.replica_axis(), Placement::replicate_summed());
}

ShardedParameters::ShardedParameters(
    std::vector<std::vector<Bundle>> units, comm::Communicator& ranks,
    const std::optional<GradientOptions>& options,
    const at::TensorOptions& full, const UnitMemory& memory,
    const program::Versions& versions)
    : versions_(versions), used_(units.size()) {
  for (size_t unit = 0; unit < units.size(); ++unit) {
    units_.emplace_back();
    KeptMemory kept;
    if (memory) {
      kept = [&, unit](at::IntArrayRef sizes, at::ScalarType type) {
        return memory(static_cast<int64_t>(unit), sizes, type);
      };
    }
    for (auto& bundle : units[unit]) {
      comm::Group& shards =
          *ranks.make_group(bundle.shards, mesh::name_of(bundle.axis));
      comm::Group& peers = *ranks.make_group(bundle.peers, bundle.peers_name);
      units_.back().push_back(std::make_unique<Held>(std::move(bundle), options,
                                                     full, kept, shards, peers,
                                                     sent_, versions));
      const Held& held = *units_.back().back();
      for (size_t i = 0; i < held.bundle.parameters.size(); ++i) {
        const auto& parameter = held.bundle.parameters[i];
        parameters_.push_back({.name = parameter.name,
                               .layout = parameter.spec->layout,
                               .shard = held.parameters.shards()[i],
                               .gradient = held.gradient(i),
                               .unit = static_cast<int64_t>(unit),
                               .balances_load = parameter.spec->balances_load});
        if (!held.bundle.is_frozen) trained_.push_back(parameters_.back());
      }
    }
  }
}

ShardedParameters::~ShardedParameters() = default;

std::vector<at::Tensor> ShardedParameters::full(int64_t unit) const {
  std::vector<at::Tensor> tensors;
  for (const auto& held : units_.at(unit)) {
    for (const auto& parameter : held->bundle.parameters) {
      tensors.push_back(parameter.tensor);
    }
  }
  return tensors;
}

void ShardedParameters::for_all(const auto& act) {
  for (auto& unit : units_) {
    for (auto& held : unit) act(*held);
  }
}

void ShardedParameters::begin_gather(int64_t unit, comm::Mode mode,
                                     int64_t version) {
  for (auto& held : units_.at(unit)) {
    held->parameters.begin_gather(mode, version);
  }
}

void ShardedParameters::await_gather(int64_t unit, int64_t version) {
  for (auto& held : units_.at(unit)) held->parameters.await_gather(version);
}

void ShardedParameters::free(int64_t unit, int64_t version) {
  for (auto& held : units_.at(unit)) held->parameters.free(version);
}

void ShardedParameters::gather_all() {
  const int64_t newest = versions_.parameters - 1;
  for (size_t i = 0; i < units_.size(); ++i) {
    const auto unit = static_cast<int64_t>(i);
    for (auto& held : units_[i]) {
      held->parameters.begin_gather(comm::Mode::kBlocking, newest);
      held->parameters.await_gather(newest);
    }
    use(unit, newest);
  }
}

void ShardedParameters::use(int64_t unit, int64_t version) {
  if (versions_.parameters == 1) return;
  if (std::exchange(used_.at(unit), steps_ + version) == steps_ + version) {
    return;
  }
  for (auto& held : units_[unit]) {
    held->parameters.use(version);
    held->for_gradients(steps_ + version, [](auto& all) { all.use(); });
  }
}

void ShardedParameters::keep(int64_t unit) {
  for (auto& held : units_.at(unit)) held->parameters.keep();
}

void ShardedParameters::next_version() {
  ++steps_;
  for_all([this](Held& held) {
    held.parameters.next_version();
    held.point_gradients(steps_);
  });
}

void ShardedParameters::make_versions_alike() {
  for_all([](Held& held) { held.parameters.make_alike(); });
}

at::Tensor ShardedParameters::shard_of_step(size_t parameter) const {
  for (const auto& unit : units_) {
    for (const auto& held : unit) {
      const auto& own = held->parameters.own_of_step();
      if (parameter < own.size()) return own[parameter];
      parameter -= own.size();
    }
  }
  TORCH_INTERNAL_ASSERT(false, "there is no such parameter");
}

std::vector<at::Tensor> ShardedParameters::full_masters() {
  std::vector<at::Tensor> all;
  for (auto& unit : units_) {
    for (auto& held : unit) {
      const auto some = held->parameters.full_masters();
      all.insert(all.end(), some.begin(), some.end());
    }
  }
  return all;
}

void ShardedParameters::take(const std::vector<at::Tensor>& full_masters) {
  auto next = full_masters.begin();
  for (auto& unit : units_) {
    for (auto& held : unit) {
      const auto count = static_cast<int64_t>(held->bundle.parameters.size());
      held->parameters.take({next, next + count});
      next += count;
    }
  }
}

void ShardedParameters::zero_gradients(int64_t version) {
  // They are in use then, where there are several.
  used_.assign(used_.size(), std::nullopt);
  for_all([&](Held& held) {
    held.for_gradients(steps_ + version, [](auto& all) { all.zero(); });
  });
}

void ShardedParameters::complete_gradients(int64_t version) {
  for_all([&](Held& held) {
    held.for_gradients(steps_ + version, [](auto& all) { all.complete(); });
  });
}

void ShardedParameters::allocate_gradients(int64_t unit, int64_t version) {
  for (auto& held : units_.at(unit)) {
    held->for_gradients(steps_ + version, [](auto& all) { all.allocate(); });
  }
}

void ShardedParameters::begin_reduction(int64_t unit, comm::Mode mode,
                                        int64_t version) {
  for (auto& held : units_.at(unit)) {
    held->for_gradients(steps_ + version,
                        [&](auto& all) { all.begin_reduction(mode); });
  }
}

void ShardedParameters::await_reduction(int64_t unit, int64_t version) {
  for (auto& held : units_.at(unit)) {
    held->for_gradients(steps_ + version,
                        [](auto& all) { all.await_reduction(); });
  }
}

void ShardedParameters::begin_sum(int64_t unit, comm::Mode mode,
                                  int64_t version) {
  for (auto& held : units_.at(unit)) {
    held->for_gradients(steps_ + version,
                        [&](auto& all) { all.begin_sum(mode); });
  }
}

void ShardedParameters::await_sum(int64_t unit, int64_t version) {
  for (auto& held : units_.at(unit)) {
    held->for_gradients(steps_ + version, [](auto& all) { all.await_sum(); });
  }
}

}  // namespace tessera::parallel::data

#include "tessera/parallel/data/sharded_parameters.h"

#include <utility>

#include "tessera/parallel/data/parameter_storage.h"

namespace tessera::parallel::data {

using mesh::Axis;
using mesh::Placement;

// What a rank holds of a bundle.
struct ShardedParameters::Held {
  Held(Bundle of, const std::optional<GradientOptions>& options,
       std::optional<at::ScalarType> full, const KeptMemory& memory,
       comm::Group& shards, comm::Group& peers)
      : bundle(std::move(of)), parameters(bundle, shards, full, memory) {
    if (options && !bundle.is_frozen)
      gradients = make_gradients(bundle, *options, shards, peers);
  }
  void for_gradients(const auto& act) {
    if (gradients) act(*gradients);
  }
  at::Tensor gradient(size_t i) const {
    return gradients ? gradients->shards()[i] : at::Tensor();
  }

  const Bundle bundle;
  ParameterStorage parameters;
  std::unique_ptr<GradientStorage> gradients;
};

void set_layout(const nn::Parameter& parameter, int64_t stage) {
  const Placement own =
      stage == 0 ? Placement::replicate_summed()
                 : Placement::shard(parameter.spec->layout.data_dim());
  mesh::Layout& layout = parameter.spec->layout;
  layout = layout.with(layout.data_axis(), own);
  if (layout.is_of_expert()) return;
  layout = layout.with(Axis::kDpReplicate, Placement::replicate_summed());
}

ShardedParameters::ShardedParameters(
    std::vector<std::vector<Bundle>> units, comm::Communicator& ranks,
    const std::optional<GradientOptions>& options,
    std::optional<at::ScalarType> full, const UnitMemory& memory) {
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
      units_.back().push_back(std::make_unique<Held>(
          std::move(bundle), options, full, kept, shards, peers));
      const Held& held = *units_.back().back();
      for (size_t i = 0; i < held.bundle.parameters.size(); ++i) {
        const auto& parameter = held.bundle.parameters[i];
        parameters_.push_back({.name = parameter.name,
                               .layout = parameter.spec->layout,
                               .shard = held.parameters.shards()[i],
                               .gradient = held.gradient(i),
                               .unit = static_cast<int64_t>(unit)});
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

void ShardedParameters::begin_gather(int64_t unit, comm::Mode mode) {
  for (auto& held : units_.at(unit)) held->parameters.begin_gather(mode);
}

void ShardedParameters::await_gather(int64_t unit) {
  for (auto& held : units_.at(unit)) held->parameters.await_gather();
}

void ShardedParameters::free(int64_t unit) {
  for (auto& held : units_.at(unit)) held->parameters.free();
}

void ShardedParameters::gather_all() {
  for (auto& unit : units_) {
    for (auto& held : unit) {
      held->parameters.begin_gather(comm::Mode::kBlocking);
      held->parameters.await_gather();
    }
  }
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

void ShardedParameters::zero_gradients() {
  for (auto& unit : units_) {
    for (auto& held : unit) held->for_gradients([](auto& all) { all.zero(); });
  }
}

void ShardedParameters::allocate_gradients(int64_t unit) {
  for (auto& held : units_.at(unit))
    held->for_gradients([](auto& all) { all.allocate(); });
}

void ShardedParameters::begin_reduction(int64_t unit, comm::Mode mode) {
  for (auto& held : units_.at(unit))
    held->for_gradients([&](auto& all) { all.begin_reduction(mode); });
}

void ShardedParameters::await_reduction(int64_t unit) {
  for (auto& held : units_.at(unit))
    held->for_gradients([](auto& all) { all.await_reduction(); });
}

void ShardedParameters::begin_sum(int64_t unit, comm::Mode mode) {
  for (auto& held : units_.at(unit))
    held->for_gradients([&](auto& all) { all.begin_sum(mode); });
}

void ShardedParameters::await_sum(int64_t unit) {
  for (auto& held : units_.at(unit))
    held->for_gradients([](auto& all) { all.await_sum(); });
}

}  // namespace tessera::parallel::data

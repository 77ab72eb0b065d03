#include "tessera/module_engine/sharded_checkpoint.h"

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/agree.h"
#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/module_engine/detail/client_state.h"
#include "tessera/module_engine/detail/module_parts.h"
#include "tessera/module_engine/detail/module_state.h"

namespace tessera {

namespace {

using torch::optim::OptimizerParamState;
using wrappers::ParameterShard;

// What an optimizer keeps of one parameter.
struct Kept {
  int64_t* steps = nullptr;  // none, of an optimizer that counts none
  std::vector<std::pair<std::string, at::Tensor*>> tensors;
};

template <typename State>
Kept kept_by_adam(State& of) {
  return {&of.step(),
          {{"exp_avg", &of.exp_avg()},
           {"exp_avg_sq", &of.exp_avg_sq()},
           {"max_exp_avg_sq", &of.max_exp_avg_sq()}}};
}

Kept kept_by(torch::optim::AdamParamState& of) { return kept_by_adam(of); }
Kept kept_by(torch::optim::AdamWParamState& of) { return kept_by_adam(of); }
Kept kept_by(torch::optim::SGDParamState& of) {
  return {nullptr, {{"momentum_buffer", &of.momentum_buffer()}}};
}
Kept kept_by(torch::optim::RMSpropParamState& of) {
  return {&of.step(),
          {{"square_avg", &of.square_avg()},
           {"momentum_buffer", &of.momentum_buffer()},
           {"grad_avg", &of.grad_avg()}}};
}
Kept kept_by(torch::optim::AdagradParamState& of) {
  return {&of.step(), {{"sum", &of.sum()}}};
}

// Which of its tensors an optimizer keeps by its options, whatever parameter.
using Keys = std::set<std::string>;

template <typename Options>
Keys keys_of_adam(const Options& of) {
  Keys keys = {"exp_avg", "exp_avg_sq"};
  if (of.amsgrad()) keys.insert("max_exp_avg_sq");
  return keys;
}

Keys keys_of(const torch::optim::AdamOptions& of) { return keys_of_adam(of); }
Keys keys_of(const torch::optim::AdamWOptions& of) { return keys_of_adam(of); }
Keys keys_of(const torch::optim::SGDOptions& of) {
  return of.momentum() == 0 ? Keys{} : Keys{"momentum_buffer"};
}
Keys keys_of(const torch::optim::RMSpropOptions& of) {
  Keys keys = {"square_avg"};
  if (of.momentum() > 0) keys.insert("momentum_buffer");
  if (of.centered()) keys.insert("grad_avg");
  return keys;
}
Keys keys_of(const torch::optim::AdagradOptions& of) { return {"sum"}; }

// A kind of optimizer, and of what it keeps.
struct Kind {
  const char* name;
  Keys (*keys)(const torch::optim::OptimizerOptions&);
  bool (*is)(const torch::optim::Optimizer&);
  std::unique_ptr<OptimizerParamState> (*make)();
  Kept (*kept)(OptimizerParamState&);
};

template <typename Optimizer, typename Options, typename State>
constexpr Kind kind(const char* name) {
  return {name,
          [](const torch::optim::OptimizerOptions& of) {
            return keys_of(dynamic_cast<const Options&>(of));
          },
          [](const torch::optim::Optimizer& of) {
            return dynamic_cast<const Optimizer*>(&of) != nullptr;
          },
          []() -> std::unique_ptr<OptimizerParamState> {
            return std::make_unique<State>();
          },
          [](OptimizerParamState& of) {
            return kept_by(dynamic_cast<State&>(of));
          }};
}

constexpr std::array kKinds = {
    kind<torch::optim::Adam, torch::optim::AdamOptions,
         torch::optim::AdamParamState>("Adam"),
    kind<torch::optim::AdamW, torch::optim::AdamWOptions,
         torch::optim::AdamWParamState>("AdamW"),
    kind<torch::optim::SGD, torch::optim::SGDOptions,
         torch::optim::SGDParamState>("SGD"),
    kind<torch::optim::RMSprop, torch::optim::RMSpropOptions,
         torch::optim::RMSpropParamState>("RMSprop"),
    kind<torch::optim::Adagrad, torch::optim::AdagradOptions,
         torch::optim::AdagradParamState>("Adagrad"),
};

const Kind& kind_of(const torch::optim::Optimizer& optimizer) {
  for (const Kind& each : kKinds) {
    if (each.is(optimizer)) return each;
  }
  TS_CHECK_CONFIG(false,
                  "ShardedCheckpoint: what this optimizer keeps is not known. "
                  "Known are torch::optim's Adam, AdamW, SGD, RMSprop and "
                  "Adagrad; of another save shards() by checkpoint/checkpoint.h"
                  ".");
}

// What is refused on one rank all refuse.
void agree(comm::Group& world, const std::function<void()>& check) {
  const std::string complaint =
      comm::first_complaint(world, comm::complaint_of(check));
  TS_CHECK_CONFIG(complaint.empty(), complaint);
}

using FindParts = std::function<std::vector<detail::ModulePart>()>;

std::vector<detail::ModulePart> agreed_parts(
    const FindParts& find, const torch::optim::Optimizer& optimizer,
    comm::Group& world) {
  std::vector<detail::ModulePart> parts;
  std::string kind;
  agree(world, [&] {
    kind = kind_of(optimizer).name;
    parts = find();
  });
  const std::string first = comm::text_of_rank_0(world, kind);
  agree(world, [&] {
    TS_CHECK_CONFIG(
        kind == first,
        "ShardedCheckpoint: this rank's optimizer is torch::optim::", kind,
        ", and the first one's ", first, ". Give all ranks the same kind.");
  });
  return parts;
}

std::vector<detail::ModulePart> parts_of(
    const std::vector<PipelineStage>& stages) {
  std::vector<detail::ModulePart> parts;
  for (const PipelineStage& stage : stages) {
    parts.push_back({&stage.module(),
                     stage.sharded() ? stage.sharded()->shards()
                                     : wrappers::shards_of(stage.module()),
                     stage.index()});
  }
  return parts;
}

}  // namespace

struct ShardedCheckpoint::Impl {
  Impl(std::string of, const FindParts& find, torch::optim::Optimizer& with,
       comm::Communicator& on)
      : folder(std::move(of)),
        optimizer(with),
        ranks(on),
        parts(agreed_parts(find, with, on.world()), on.world()),
        kind(kind_of(with)),
        shards(parts.shards()) {
    agree(on.world(), [&] { require_shards(); });
    const std::string unwritable = comm::first_complaint(
        on.world(), comm::complaint_of([&] { require_writable(); }));
    TS_CHECK_IO(unwritable.empty(), unwritable);
  }

  const std::string folder;
  torch::optim::Optimizer& optimizer;
  comm::Communicator& ranks;
  const detail::ModuleParts parts;
  const Kind& kind;
  const std::vector<ParameterShard>& shards;

  using States = std::decay_t<decltype(optimizer.state())>;

  // By its group's options, of a parameter of that shard; none: it is in no
  // group.
  std::optional<Keys> keys_of(const ParameterShard& shard) const {
    for (auto& group : optimizer.param_groups()) {
      for (const auto& each : group.params()) {
        if (each.is_same(shard.parameter)) return kind.keys(group.options());
      }
    }
    return std::nullopt;
  }
  checkpoint::State parameters() const { return {parts.entries(), ""}; }
  void require_shards() const;
  void require_writable() const;
  std::string of_all_ranks(const detail::Json& said);
  detail::Json said_in(const std::string& extra,
                       const std::string& where) const;
  detail::Json add_states(checkpoint::State& state);
  States make_states(const detail::Json& said, const std::string& where,
                     checkpoint::State& state);
};

// Of other parameters nothing would be saved.
void ShardedCheckpoint::Impl::require_shards() const {
  for (auto& group : optimizer.param_groups()) {
    for (const auto& each : group.params()) {
      const bool is_shard =
          std::ranges::any_of(shards, [&](const ParameterShard& shard) {
            return each.is_same(shard.parameter);
          });
      TS_CHECK_CONFIG(is_shard,
                      "ShardedCheckpoint: the optimizer has a parameter, ",
                      each.sizes(),
                      ", that this module does not have. Make the optimizer "
                      "behind fully_shard() and parallelize(), of what "
                      "parameters() has then.");
    }
  }
}

// Found out now, and not behind hours of training.
void ShardedCheckpoint::Impl::require_writable() const {
  const auto existing = existing_part(folder);
  TS_CHECK_IO(::access(existing.c_str(), W_OK | X_OK) == 0 &&
                  std::filesystem::is_directory(existing),
              folder,
              ": checkpoints cannot be written there: ", existing.string(),
              " is no folder that may be written to. Give another folder.");
}

// Returns which there are, by the parameter's name: what this rank is the first
// to know.
detail::Json ShardedCheckpoint::Impl::add_states(checkpoint::State& state) {
  detail::Json said = detail::Json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const ParameterShard& shard = shards[i];
    const auto of =
        optimizer.state().find(shard.parameter.unsafeGetTensorImpl());
    if (of == optimizer.state().end()) continue;
    const Kept kept = kind.kept(*of->second);
    detail::Json keys = detail::Json::array();
    for (const auto& [key, tensor] : kept.tensors) {
      if (!tensor->defined()) continue;
      keys.push_back(key);
      state.tensors.push_back(detail::entry_of(
          "optimizer." + key + "." + shard.name, shard, *tensor));
    }
    if (!parts.is_first(i)) continue;
    said[shard.name] = {{"steps", kept.steps ? *kept.steps : 0},
                        {"tensors", keys}};
  }
  return said;
}

// What each said, as one; on every rank.
std::string ShardedCheckpoint::Impl::of_all_ranks(const detail::Json& said) {
  detail::Json all = detail::Json::object();
  for (const auto& text : comm::gather_texts(ranks.world(), said.dump())) {
    all.update(detail::Json::parse(text));
  }
  return comm::text_of_rank_0(ranks.world(), all.dump());
}

// Those that add_states() returned, to be loaded.
ShardedCheckpoint::Impl::States ShardedCheckpoint::Impl::make_states(
    const detail::Json& said, const std::string& where,
    checkpoint::State& state) {
  States states;
  for (const auto& shard : shards) {
    const auto found = said.find(shard.name);
    if (found == said.end()) continue;
    auto made = kind.make();
    const Kept kept = kind.kept(*made);
    detail::reading(where, [&] {
      if (kept.steps) *kept.steps = found->at("steps").get<int64_t>();
      const auto keys = found->at("tensors").get<Keys>();
      const std::optional<Keys> wanted = keys_of(shard);
      TS_CHECK_CONFIG(wanted.has_value(), where,
                      ": the optimizer kept states of '", shard.name,
                      "', which is in no group of the optimizer now. Make it "
                      "of all parameters that it was saved with; what is not "
                      "to be trained any more is frozen by "
                      "requires_grad_(false).");
      TS_CHECK_CONFIG(
          keys == *wanted, where, ": of '", shard.name, "' the optimizer kept ",
          c10::Join(", ", keys),
          "; with its options now torch::optim::", kind.name, " keeps ",
          c10::Join(", ", *wanted),
          ". Give it the options that it was saved with (amsgrad, momentum, "
          "centered).");
      for (const auto& [key, tensor] : kept.tensors) {
        if (!keys.contains(key)) continue;
        *tensor = at::zeros_like(shard.parameter);
        state.tensors.push_back(detail::entry_of(
            "optimizer." + key + "." + shard.name, shard, *tensor));
      }
    });
    states[shard.parameter.unsafeGetTensorImpl()] = std::move(made);
  }
  return states;
}

ShardedCheckpoint::ShardedCheckpoint(std::string folder,
                                     const std::vector<PipelineStage>& stages,
                                     torch::optim::Optimizer& optimizer,
                                     comm::Communicator& ranks)
    : impl_(std::make_unique<Impl>(
          std::move(folder), [&] { return parts_of(stages); }, optimizer,
          ranks)) {}

ShardedCheckpoint::ShardedCheckpoint(std::string folder,
                                     torch::nn::Module& module,
                                     torch::optim::Optimizer& optimizer,
                                     comm::Communicator& ranks)
    : impl_(std::make_unique<Impl>(
          std::move(folder),
          [&]() -> std::vector<detail::ModulePart> {
            return {{&module, wrappers::shards_of(module)}};
          },
          optimizer, ranks)) {}

ShardedCheckpoint::~ShardedCheckpoint() = default;

void ShardedCheckpoint::save(int64_t step, const std::string& client_state,
                             int64_t keep) {
  Impl& self = *impl_;
  detail::check_client_state(client_state);
  comm::compare_calls(self.ranks);  // of ranks out of step nothing is kept
  checkpoint::State state = self.parameters();
  const std::string states = self.of_all_ranks(self.add_states(state));
  state.extra = detail::Json{{"optimizer", self.kind.name},
                             {"states", detail::Json::parse(states)},
                             {"client_state", client_state}}
                    .dump();
  checkpoint::save(self.folder, step, state, self.ranks.world(),
                   {.keep = keep});
}

// Its manifest tells which tensors there are.
detail::Json ShardedCheckpoint::Impl::said_in(const std::string& extra,
                                              const std::string& where) const {
  const detail::Json said = detail::parse_json(extra, where);
  for (const char* key : {"optimizer", "states", "client_state"}) {
    TS_CHECK_IO(said.contains(key), where, ": the key ", key,
                " is missing; this is no checkpoint of ShardedCheckpoint's.");
  }
  const auto kind = detail::as_string(said["optimizer"], where + ": optimizer");
  TS_CHECK_CONFIG(kind == this->kind.name, where,
                  ": its optimizer is torch::optim::", kind, ", and this one ",
                  this->kind.name, ". Go on with the same kind.");
  return said;
}

std::optional<ShardedCheckpoint::Loaded> ShardedCheckpoint::load() {
  Impl& self = *impl_;
  const at::NoGradGuard no_grad;
  Impl::States states;
  std::string client_state;
  const auto told = [&](const std::string& where, const std::string& extra,
                        checkpoint::State& state) {
    const detail::Json said = self.said_in(extra, where);
    client_state =
        detail::as_string(said["client_state"], where + ": client_state");
    state = self.parameters();
    states = self.make_states(said["states"], where, state);
  };
  checkpoint::State state;
  const auto step =
      detail::load_from(self.folder, state, self.ranks.world(), {.told = told});
  if (!step) return std::nullopt;
  self.optimizer.state() = std::move(states);
  return Loaded{*step, client_state};
}

}  // namespace tessera

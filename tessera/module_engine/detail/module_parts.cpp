#include "tessera/module_engine/detail/module_parts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/module_engine/detail/module_state.h"

namespace tessera::detail {
namespace {

using wrappers::ParameterShard;

// What ranks tell each other of a tensor that they hold, as numbers.
struct Holding {
  int64_t name = 0, box = 0, stage = 0;
};
constexpr int64_t kNumbers = 3;
constexpr int64_t kNoStage = -1;  // where a rank has fewer tensors than others

int64_t hash_of(const std::string& text) {
  return static_cast<int64_t>(hash64(text));
}

Holding holding_of(const std::string& name, const mesh::Box& box,
                   int64_t stage) {
  return {hash_of(name),
          hash_of(c10::str(name, at::IntArrayRef(box.offset),
                           at::IntArrayRef(box.size))),
          stage};
}

// By rank.
std::vector<std::vector<Holding>> holdings_of_all(
    const std::vector<Holding>& here, comm::Group& world) {
  at::Tensor most = at::full({1}, std::ssize(here), at::kLong);
  world.all_reduce(most, comm::ReduceOp::kMax).synchronize();
  const int64_t rows = most.item<int64_t>();
  at::Tensor mine = at::full({rows, kNumbers}, kNoStage, at::kLong);
  for (int64_t i = 0; i < std::ssize(here); ++i) {
    mine[i] = at::tensor({here[i].name, here[i].box, here[i].stage}, at::kLong);
  }
  at::Tensor all = at::empty({world.size() * rows, kNumbers}, at::kLong);
  world.all_gather(all, mine).synchronize();
  const auto* next = all.const_data_ptr<int64_t>();
  std::vector<std::vector<Holding>> held(world.size());
  for (auto& of_rank : held) {
    for (int64_t row = 0; row < rows; ++row, next += kNumbers) {
      if (next[2] == kNoStage) continue;
      of_rank.push_back({next[0], next[1], next[2]});
    }
  }
  return held;
}

void require_names_of_one_stage(const std::vector<std::string>& names,
                                const std::vector<Holding>& here,
                                const std::vector<std::vector<Holding>>& all,
                                comm::Group& world) {
  std::map<int64_t, std::pair<int64_t, int64_t>> stages;  // least, greatest
  for (const auto& of_rank : all) {
    for (const Holding& each : of_rank) {
      const auto [found, is_new] =
          stages.try_emplace(each.name, each.stage, each.stage);
      auto& [least, greatest] = found->second;
      least = std::min(least, each.stage);
      greatest = std::max(greatest, each.stage);
    }
  }
  const std::string complaint = comm::first_complaint(
      world, comm::complaint_of([&] {
        for (size_t i = 0; i < here.size(); ++i) {
          const auto [least, greatest] = stages.at(here[i].name);
          TS_CHECK_CONFIG(least == greatest, "ShardedCheckpoint: stages ",
                          least, " and ", greatest,
                          " of the pipeline both have a tensor called \"",
                          names[i],
                          "\". Call what a stage has as in the whole model: "
                          "split() does, and a part that is registered under "
                          "its name in an outer module.");
        }
      }));
  TS_CHECK_CONFIG(complaint.empty(), complaint);
}

// The ranks, ascending, that say this of a holding.
using Holders = std::map<int64_t, std::vector<int64_t>>;
Holders holders_by(int64_t Holding::* member,
                   const std::vector<std::vector<Holding>>& all) {
  Holders holders;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const Holding& each : all[rank]) {
      auto& ranks = holders[each.*member];
      const auto one = static_cast<int64_t>(rank);
      if (ranks.empty() || ranks.back() != one) ranks.push_back(one);
    }
  }
  return holders;
}

}  // namespace

ModuleParts::ModuleParts(std::vector<ModulePart> here, comm::Group& world)
    : parts_(std::move(here)) {
  std::vector<std::string> names;
  std::vector<Holding> held;
  for (const ModulePart& part : parts_) {
    for (const ParameterShard& shard : part.shards) {
      names.push_back(shard.name);
      held.push_back(holding_of(shard.name, shard.box, part.stage));
      shards_.push_back(shard);
    }
  }
  for (const ModulePart& part : parts_) {
    for (const auto& buffer : part.module->named_buffers()) {
      names.push_back(buffer.key());
      held.push_back(holding_of(buffer.key(),
                                mesh::Box::whole(buffer.value().sizes().vec()),
                                part.stage));
    }
  }
  const auto all = holdings_of_all(held, world);
  require_names_of_one_stage(names, held, all, world);
  const Holders by_name = holders_by(&Holding::name, all);
  const Holders by_box = holders_by(&Holding::box, all);
  for (size_t i = 0; i < held.size(); ++i) {
    const bool is_first = by_name.at(held[i].name).front() == world.rank();
    if (i >= shards_.size()) {
      writes_buffer_[names[i]] = is_first;
      continue;
    }
    is_first_.push_back(is_first);
    const auto& ranks = by_box.at(held[i].box);
    const auto number = static_cast<uint64_t>(held[i].box) % ranks.size();
    shards_[i].owned = ranks[number] == world.rank();
  }
}

std::vector<checkpoint::TensorEntry> ModuleParts::entries() const {
  std::vector<checkpoint::TensorEntry> entries;
  for (const ParameterShard& shard : shards_) {
    // As it is now: torch::load() gives a parameter other memory.
    entries.push_back(
        entry_of("model." + shard.name, shard, shard.parameter.detach()));
  }
  for (const ModulePart& part : parts_) {
    for (const auto& item : part.module->named_buffers()) {
      const auto found = writes_buffer_.find(item.key());
      TS_CHECK(found != writes_buffer_.end(), "ShardedCheckpoint: the buffer ",
               item.key(),
               " was registered since. Make it when the module has all.");
      entries.push_back(
          common_entry("model." + item.key(), item.value(), found->second));
    }
  }
  return entries;
}

}  // namespace tessera::detail

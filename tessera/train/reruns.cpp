#include "tessera/train/reruns.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "tessera/comm/agree.h"
#include "tessera/comm/host_map.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/train/compute_again.h"
#include "tessera/train/replicas.h"

namespace tessera::train {

namespace {

bool has_two_alike(std::vector<uint64_t> hashes) {
  std::ranges::sort(hashes);
  return std::ranges::adjacent_find(hashes) != hashes.end();
}

// Where the ranks that hold a model together lie on hosts in another way than
// those of another replica, sums over them may be in another order.
bool replicas_lie_alike(const mesh::DeviceMesh& mesh, comm::Group& world) {
  const auto hosts = comm::hosts_of(world);
  std::map<int64_t, std::vector<std::string>> by_replica;
  for (int64_t rank = 0; rank < world.size(); ++rank) {
    by_replica[mesh.data_rank_of(mesh.coord_of(rank))].push_back(hosts[rank]);
  }
  std::set<std::vector<std::vector<int64_t>>> ways;
  for (const auto& [replica, names] : by_replica) {
    ways.insert(comm::make_host_map(names, /*rank=*/0).members);
  }
  return ways.size() == 1;
}

// "": nothing speaks against it. The same on every rank. Collective.
std::string why_not_exchanged(const engine::RunConfig& config,
                              engine::RankModel& model, comm::Group& world) {
  if (!config.batch.rows.empty()) return "ranks have unequal shares of a batch";
  if (config.model.moe.experts > 0) return "experts sum in an order of ranks";
  if (!replicas_lie_alike(model.mesh(), world)) {
    return "the ranks of a model lie on hosts in several ways";
  }
  const auto device = model.composed().activations.device();
  return computing_otherwise(
      world,
      c10::str(at::get_num_threads(), " threads of ", processor_of(device)));
}

}  // namespace

RerunVerdict verdict_on(const std::vector<Rerun>& all) {
  // Who took a rank's samples.
  std::map<int64_t, const Rerun*> before, before_that;
  for (const Rerun& each : all) {
    before[each.next] = &each;
    before_that[each.after] = &each;
  }
  std::set<int64_t> transient, persistent;
  RerunVerdict verdict;
  for (const Rerun& mine : all) {
    const Rerun& other = *before.at(mine.rank);
    const Rerun& third = *before_that.at(mine.rank);
    if (mine.own == mine.own_again && mine.own == other.of_next) continue;
    verdict.differs = true;
    if (mine.own != mine.own_again) {
      const bool is_once =
          has_two_alike({mine.own, mine.own_again, other.of_next}) ||
          has_two_alike({mine.own, mine.own_again, other.of_next_again}) ||
          has_two_alike({mine.own, mine.own_again, third.of_after});
      (is_once ? transient : persistent).insert(mine.rank);
    } else if (other.of_next != other.of_next_again) {
      const bool is_once = other.of_next_again == mine.own;
      (is_once ? transient : persistent).insert(other.rank);
    } else {  // each says the same again: a third rank knows who is right
      const bool is_known = third.rank != mine.rank;
      const bool is_mine_right = is_known && third.of_after == mine.own;
      const bool is_others_right = is_known && third.of_after == other.of_next;
      if (!is_mine_right) persistent.insert(mine.rank);
      if (!is_others_right) persistent.insert(other.rank);
    }
  }
  for (const int64_t rank : persistent) transient.erase(rank);
  verdict.transient.assign(transient.begin(), transient.end());
  verdict.persistent.assign(persistent.begin(), persistent.end());
  return verdict;
}

Reruns::Reruns(int64_t every, const engine::RunConfig& config,
               engine::RankModel& model, comm::Group& world)
    : every_(every), model_(model), world_(world) {
  if (every_ == 0 || model.composed().data->size() == 1) return;
  const std::string why = why_not_exchanged(config, model, world);
  exchanges_ = why.empty();
  if (exchanges_ || world.rank() != 0) return;
  log::info("monitor.reruns: no rank computes what another one did, as ", why);
}

std::vector<Reruns::Gradient> Reruns::compute(engine::StepInput input) {
  std::vector<Gradient> all;
  input.next.reset();
  compute_again(
      model_, std::move(input),
      [&](const std::string& parameter, int64_t microbatch,
          const at::Tensor& gradient) {
        all.push_back({parameter, microbatch, hash_of_bytes(gradient)});
      });
  return all;
}

engine::StepInput Reruns::of_other(engine::StepInput input,
                                   int64_t places) const {
  if (!exchanges_) return input;
  const int64_t shares = model_.composed().data->size();
  const auto other = [shares, places](int64_t share) {
    return (share + places) % shares;
  };
  input.read.load = [load = input.read.load, other](int64_t share,
                                                    int64_t microbatch) {
    return load(other(share), microbatch);
  };
  input.draw = [draw = input.draw, other](int64_t share, int64_t microbatch) {
    return draw(other(share), microbatch);
  };
  return input;
}

int64_t Reruns::rank_on(int64_t places) const {
  if (!exchanges_) return world_.rank();
  const comm::Group& data = *model_.composed().data;
  return data.ranks()[(data.rank() + places) % data.size()];
}

std::vector<Rerun> Reruns::all_of(const Rerun& mine) {
  constexpr int64_t kNumbers = 7;
  const auto word = [](uint64_t hash) { return static_cast<int64_t>(hash); };
  const at::Tensor input = at::tensor(
      {mine.next, mine.after, word(mine.own), word(mine.own_again),
       word(mine.of_next), word(mine.of_next_again), word(mine.of_after)},
      at::kLong);
  const at::Tensor output = at::empty({world_.size() * kNumbers}, at::kLong);
  world_.all_gather(output, input).synchronize();
  std::vector<Rerun> all;
  const auto* number = output.const_data_ptr<int64_t>();
  const auto hash = [&] { return static_cast<uint64_t>(*number++); };
  for (int64_t rank = 0; rank < world_.size(); ++rank) {
    all.push_back({.rank = rank,
                   .next = *number++,
                   .after = *number++,
                   .own = hash(),
                   .own_again = hash(),
                   .of_next = hash(),
                   .of_next_again = hash(),
                   .of_after = hash()});
  }
  return all;
}

// Where this rank differs from itself.
void Reruns::tell_place(int64_t step, const std::vector<Gradient>& first,
                        const std::vector<Gradient>& second) {
  const auto at =
      std::ranges::mismatch(first, second, {}, &Gradient::hash, &Gradient::hash)
          .in1;
  if (at == first.end()) return;
  log::warning("step ", step,
               ", computed twice, differs first in the gradient of '",
               at->parameter, "', behind micro-batch ", at->microbatch);
}

void Reruns::check(int64_t step, const engine::StepInput& input) {
  const auto hash_of = [](const std::vector<Gradient>& gradients) {
    std::vector<uint64_t> hashes;
    for (const Gradient& each : gradients) hashes.push_back(each.hash);
    return hash64(std::as_bytes(std::span(hashes)));
  };
  const auto first = compute(input), second = compute(input);
  Rerun mine{.rank = world_.rank(),
             .next = rank_on(1),
             .after = rank_on(2),
             .own = hash_of(first),
             .own_again = hash_of(second),
             .of_next = hash_of(compute(of_other(input, 1)))};
  if (!verdict_on(all_of(mine)).differs) return;
  mine.of_next_again = hash_of(compute(of_other(input, 1)));
  mine.of_after = hash_of(compute(of_other(input, 2)));
  const RerunVerdict verdict = verdict_on(all_of(mine));
  tell_place(step, first, second);
  const auto text = [&](const std::vector<int64_t>& ranks, const char* how) {
    return c10::str("step ", step,
                    " was computed several times before its update, and by ",
                    named_ranks(ranks, model_.mesh()), " otherwise ", how);
  };
  if (!verdict.transient.empty() && world_.rank() == 0) {
    log::warning(text(verdict.transient, "once"),
                 ": a transient error of a processor or memory. Where it "
                 "happens again, leave that host out.");
  }
  TS_CHECK(verdict.persistent.empty(), text(verdict.persistent, "again"),
           ": a processor or memory there fails, or the program. What was "
           "trained since the last step that agreed may be wrong. Leave that "
           "host out, and go on from a checkpoint before (--resume PATH).");
}

}  // namespace tessera::train

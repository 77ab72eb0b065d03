#include "tessera/train/reruns.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/train/compute_again.h"
#include "tessera/train/replicas.h"

namespace tessera::train {

namespace {

bool two_agree(uint64_t a, uint64_t b, uint64_t c) {
  return a == b || a == c || b == c;
}

}  // namespace

RerunVerdict verdict_on(const std::vector<Rerun>& all) {
  // Who took a rank's samples.
  std::map<int64_t, const Rerun*> by_next, by_after;
  for (const Rerun& each : all) {
    by_next[each.next] = &each;
    by_after[each.after] = &each;
  }
  std::set<int64_t> transient, persistent;
  RerunVerdict verdict;
  for (const Rerun& own : all) {
    const Rerun& other = *by_next.at(own.rank);
    const Rerun& judge = *by_after.at(own.rank);
    if (own.first == own.second && own.first == other.third) continue;
    verdict.differs = true;
    if (own.first != own.second) {
      const bool is_once = two_agree(own.first, own.second, other.third) ||
                           two_agree(own.first, own.second, other.fourth);
      (is_once ? transient : persistent).insert(own.rank);
    } else if (other.third != other.fourth) {
      const bool is_once = other.fourth == own.first;
      (is_once ? transient : persistent).insert(other.rank);
    } else {
      const bool is_judged = judge.rank != own.rank;
      const bool is_own = is_judged && judge.fifth == other.third;
      const bool is_others = is_judged && judge.fifth == own.first;
      if (!is_others) persistent.insert(own.rank);
      if (!is_own) persistent.insert(other.rank);
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
  if (every_ == 0) return;
  const comm::Group& data = *model.composed().data;
  if (data.size() == 1) return;
  std::string why;
  if (!config.batch.rows.empty()) why = "ranks have unequal shares of a batch";
  if (config.model.moe.experts > 0) why = "experts sum in an order of ranks";
  if (why.empty()) {
    why = differing_processors(world, model.composed().activations.device());
  }
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
  const at::Tensor input =
      at::tensor({mine.next, mine.after, word(mine.first), word(mine.second),
                  word(mine.third), word(mine.fourth), word(mine.fifth)},
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
                   .first = hash(),
                   .second = hash(),
                   .third = hash(),
                   .fourth = hash(),
                   .fifth = hash()});
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
             .first = hash_of(first),
             .second = hash_of(second),
             .third = hash_of(compute(of_other(input, 1)))};
  if (!verdict_on(all_of(mine)).differs) return;
  mine.fourth = hash_of(compute(of_other(input, 1)));
  mine.fifth = hash_of(compute(of_other(input, 2)));
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

#include "tessera/wrappers/detail/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/wrappers/detail/heard_memory.h"

namespace tessera::wrappers {
namespace {

bool is_again(Act act) { return act >= Act::kForwardAgain; }

const char* name_of(Act act) {
  constexpr std::array kNames = {
      "joined",
      "forward()",
      "forward() without gradients",
      "the end of its first forward()",
      "backward",
      "the end of accumulate()",
      "the end of backward",
      "clip_grad_norm()",
      "forward()",
      "forward() without gradients",
      "backward",
  };
  return kNames.at(static_cast<size_t>(act));
}

std::vector<Act> acts_of_all(Act mine, comm::Group& group) {
  const Unheard unheard;
  const at::NoGradGuard no_grad;
  at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, static_cast<int64_t>(mine), at::kLong),
                   comm::Mode::kBlocking);
  const int64_t* first = all.const_data_ptr<int64_t>();
  std::vector<Act> acts(group.size());
  std::transform(first, first + group.size(), acts.begin(),
                 [](int64_t act) { return static_cast<Act>(act); });
  return acts;
}

Agreed agreed_of(const std::vector<Act>& acts, const comm::Group& group) {
  Agreed agreed;
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const Act act = acts[rank];
    if (act == Act::kNothing) continue;
    if (agreed.active++ == 0) {
      agreed.act = act;
      agreed.first = rank;
    }
    TS_CHECK(act == agreed.act, "fully_shard: rank ",
             group.ranks()[agreed.first], " is at ", name_of(agreed.act),
             ", rank ", group.ranks()[rank], " at ", name_of(act),
             ": ranks go forward and backward equally often; one whose data "
             "has ended calls join().");
  }
  return agreed;
}

}  // namespace

Act act_of(Part part, bool again) {
  switch (part) {
    case Part::kForward:
      return again ? Act::kForwardAgain : Act::kForward;
    case Part::kEvaluation:
      return again ? Act::kEvaluationAgain : Act::kEvaluation;
    default:
      return again ? Act::kBackwardAgain : Act::kBackward;
  }
}

Part part_of(Act act) {
  switch (act) {
    case Act::kForward:
    case Act::kForwardAgain:
      return Part::kForward;
    case Act::kEvaluation:
    case Act::kEvaluationAgain:
      return Part::kEvaluation;
    default:
      return Part::kBackward;
  }
}

Agreed agree(Act mine, comm::Group& group,
             const std::function<void(Part)>& repeat) {
  if (group.size() == 1) return {mine, mine == Act::kNothing ? 0 : 1};
  for (;;) {
    const std::vector<Act> acts = acts_of_all(mine, group);
    const auto again = std::ranges::find_if(acts, is_again);
    if (again == acts.end()) return agreed_of(acts, group);
    if (mine == *again) return {mine};
    repeat(part_of(*again));
  }
}

}  // namespace tessera::wrappers

#include "tessera/wrappers/detail/same_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::wrappers {
namespace {

// Of names, shapes and dtypes: equal on ranks with the same module.
int64_t fingerprint(const std::vector<NamedParameter>& parameters) {
  std::string text;
  for (const auto& [name, parameter] : parameters) {
    text += c10::str(name, parameter.sizes(), parameter.scalar_type(), ";");
  }
  return static_cast<int64_t>(hash64(text));
}

}  // namespace

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
             " here, or other names, shapes or dtypes. Build the same module "
             "on every rank.");
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

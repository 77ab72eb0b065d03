// A mixture of experts for any module, with any module as expert: every token
// goes to the k experts that a gate picks, all of them take what comes.
//
//   tessera::MoE moe(d, /*experts=*/32, /*k=*/2,
//                    [] { return torch::nn::Linear(d, d); }, mesh, ranks);
//   auto [output, aux_loss, counts] = moe->forward(x);
//
//   p = softmax(x W^T),   output = sum over the k largest p_e of
//                                  p_e / (sum of these k) * expert_e(x)
// With k = 1 the weight is p_e itself, through which the gate learns.
//
// Shapes:  x: (samples, ..., d); output: the same but for its last dim, which
//          is the experts'; aux_loss: a number; counts: (experts), int64.
// Ranks:   rank r along ep of the mesh has the experts [r E/ep, (r+1) E/ep),
//          as children 0, 1, ... of `experts`; the gate is whole everywhere.
//          Every expert is made on every rank, one after the other, and kept
//          where it belongs: the same initial values on any mesh, from the same
//          generator. fully_shard() knows it: an expert's parameters, gradients
//          and states are those of the ranks that hold it.
// Balance: aux_loss = mean over this rank's samples of E sum over e of f_e P_e,
//          where f_e is the share of a sample's rows that go to e, P_e the mean
//          of p_e over its tokens: 1 where the load is even, which is the
//          least. Its mean over ranks of equally many samples does not depend
//          on the mesh; 0 where there are no tokens. counts: this rank's rows
//          by expert.
// Comm:    over ep an all_gather of E counts, and an all_to_all of rows each
//          way, again in backward. A rank that routes no token, or whose
//          experts get none, calls the same; an expert runs on no rows then.
// Errors:  TS_CHECK_CONFIG for k and experts that do not fit; the mesh's own.
// Source:  Lepikhin et al. 2021, arXiv 2006.16668; Jiang et al. 2024, arXiv
//          2401.04088; Fedus et al. 2022, arXiv 2101.03961, eq. 4.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

struct MoEOutput {
  at::Tensor output, aux_loss, counts;
};

namespace wrappers {

struct Expert {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& rows)> forward;
};

// Of whatever a user's function gives: a holder, or a pointer to a module.
template <typename Holder>
Expert expert_of(Holder holder) {
  std::shared_ptr<torch::nn::Module> module;
  if constexpr (requires { holder.ptr(); }) {
    module = holder.ptr();
  } else {
    module = holder;
  }
  return {module, [holder](const at::Tensor& rows) mutable {
            return holder->forward(rows);
          }};
}

// Those of this rank.
class LocalExperts : public torch::nn::Module {
 public:
  LocalExperts(int64_t experts, int64_t ranks, int64_t rank,
               const std::function<Expert()>& make);
  // rows: those of the first expert that is here, then of the next.
  at::Tensor forward(const at::Tensor& rows,
                     const std::vector<int64_t>& splits);
  int64_t ranks() const { return ranks_; }
  // The number, among all, of the first that is here.
  int64_t first() const { return first_; }
  // As it was made: fully_shard() takes parts of it away.
  int64_t parameters_of_one() const { return parameters_of_one_; }

 private:
  int64_t ranks_, first_, parameters_of_one_ = 0;
  std::vector<Expert> experts_;
};

}  // namespace wrappers

class MoEImpl : public torch::nn::Module {
 public:
  // expert_fn: gives a new expert each time. `ranks` outlives the module.
  template <typename ExpertFn>
  MoEImpl(int64_t hidden, int64_t experts, int64_t k, ExpertFn expert_fn,
          const mesh::DeviceMesh& mesh, comm::Communicator& ranks)
      : MoEImpl(
            hidden, experts, k,
            std::function<wrappers::Expert()>([make = std::move(expert_fn)]() {
              return wrappers::expert_of(make());
            }),
            mesh, ranks) {}
  MoEImpl(int64_t hidden, int64_t experts, int64_t k,
          const std::function<wrappers::Expert()>& make,
          const mesh::DeviceMesh& mesh, comm::Communicator& ranks);

  MoEOutput forward(const at::Tensor& x);
  int64_t experts() const { return num_experts_; }
  int64_t k() const { return k_; }
  // Ranks that share the experts out.
  const std::vector<int64_t>& peers() const { return peers_; }
  // Elements of the gate's and all experts' parameters, wherever these are; and
  // of those that one token goes through.
  int64_t num_parameters() const { return count(num_experts_); }
  int64_t num_active_parameters() const { return count(k_); }

 private:
  at::Tensor balance(const at::Tensor& probabilities, const at::Tensor& picked,
                     int64_t samples) const;
  at::Tensor run(const at::Tensor& rows, const at::Tensor& counts);
  int64_t count(int64_t experts) const {
    return gate_->options.in_features() * num_experts_ +
           experts * experts_->parameters_of_one();
  }

  int64_t num_experts_, k_;
  std::vector<int64_t> peers_;  // along ep
  comm::Communicator& ranks_;
  comm::Group* exchange_ = nullptr;  // of them, from the first forward on
  torch::nn::Linear gate_;
  std::shared_ptr<wrappers::LocalExperts> experts_;
};
TORCH_MODULE(MoE);

}  // namespace tessera

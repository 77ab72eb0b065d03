// A mixture of experts for any module, with any module as expert: every token
// goes to the k experts that a gate picks.
//
//   tessera::MoE moe(d, /*experts=*/32, /*k=*/2,
//                    [] { return torch::nn::Linear(d, d); }, mesh, ranks);
//   auto [output, aux_loss, counts] = moe->forward(x);
//
//   s = softmax(x W^T),   output = sum over the k largest s_e of
//                                  s_e / (sum of these k) * expert_e(x)
// With k = 1 the weight is s_e itself, through which the gate learns. What else
// a gate may do is in MoEOptions, in the words of nn/router.h.
//
// Shapes:  x: (samples, ..., d); output: the same but for its last dim, which
//          is the experts'; aux_loss: a number; counts: (experts), int64.
// Ranks:   rank r along ep of the mesh has the experts [r E/ep, (r+1) E/ep),
//          as children 0, 1, ... of `experts`; the gate is whole everywhere.
//          Every expert is made on every rank, one after the other, and kept
//          where it belongs: the same initial values on any mesh, from the same
//          generator. fully_shard() knows it: an expert's parameters, gradients
//          and states are those of the ranks that hold it.
// Along tp: ranks see the same tokens, whole, and route them alike. With ep
//          above 1 and etp 1 each sends a piece of them on: no expert is
//          computed twice. With etp = tp, or ep 1, an expert is what
//          parallelize() makes of it: a plan may cut it.
// Capacity: with a capacity_factor c an expert takes at most c T k / E of a
//          sample's T tokens, those that come first; what a token chose beyond
//          adds nothing to it. Without, all take what comes.
// Balance: aux_loss = mean over this rank's samples of E sum over e of f_e P_e,
//          where f_e is the share of a sample's choices that are e, P_e the
//          mean of s_e (where these add up to 1) over its tokens: 1 where the
//          load is even, which is the least. Its mean over ranks of equally
//          many samples does not depend on the mesh; 0 where there are no
//          tokens. counts: how often this rank's tokens chose each expert.
//          With a bias_rate each expert has a bias b_e in the choice alone, of
//          s_e + b_e, and balance_experts() moves it: `score_bias`, a buffer.
// Comm:    over ep an all_gather of E counts, and an all_to_all of rows each
//          way, again in backward; where ranks along tp send a piece each, over
//          tp an all_gather of outputs, and in backward of dx and of weights.
//          A rank that routes no token, or whose experts get none, calls the
//          same; an expert runs on no rows then.
// Around:  with ep above 1 fully_shard(), in any stage; where ep are the ranks
//          along tp, DistributedDataParallel too. With biases no join(), and no
//          DataParallel, whose replicas count for themselves.
// Errors:  TS_CHECK_CONFIG for experts, k and options that do not fit; the
//          mesh's own. In forward: a capacity of less than one token.
// Source:  Lepikhin et al. 2021, arXiv 2006.16668; Jiang et al. 2024, arXiv
//          2401.04088; Fedus et al. 2022, arXiv 2101.03961, eq. 4 and section
//          2.2 (the capacity); Wang et al. 2024, arXiv 2408.15664 (the bias).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/router.h"

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

// A user's function, which gives a new expert each time.
class ExpertFn {
 public:
  template <typename Function>
    requires std::invocable<Function&>
  ExpertFn(Function make)
      : make_(
            [make = std::move(make)]() mutable { return expert_of(make()); }) {}
  Expert operator()() const { return make_(); }

 private:
  std::function<Expert()> make_;
};

// Those of this rank.
class LocalExperts : public torch::nn::Module {
 public:
  // peers: the ranks that share them out, ascending.
  LocalExperts(int64_t experts, std::vector<int64_t> peers, int64_t rank,
               const ExpertFn& make);
  // rows: those of the first expert that is here, then of the next.
  at::Tensor forward(const at::Tensor& rows,
                     const std::vector<int64_t>& splits);
  const std::vector<int64_t>& peers() const { return peers_; }
  int64_t ranks() const { return static_cast<int64_t>(peers_.size()); }
  // TS_CHECK_CONFIG where another mesh shares them out otherwise.
  void check(const char* who, const std::string& name,
             const mesh::DeviceMesh& mesh, int64_t rank) const;
  // The number, among all, of the first that is here.
  int64_t first() const { return first_; }
  // As it was made: fully_shard() takes parts of it away.
  int64_t parameters_of_one() const { return parameters_of_one_; }

 private:
  std::vector<int64_t> peers_;
  int64_t first_ = 0, parameters_of_one_ = 0;
  std::vector<Expert> experts_;
};

}  // namespace wrappers

using nn::GateScore;  // kSoftmax or kSigmoid

struct MoEOptions {
  GateScore score = GateScore::kSoftmax;
  // The k weights, by their sum; none: where k is above 1.
  std::optional<bool> normalize = {};
  double scale = 1;  // of the weights
  // Of experts, of which a token chooses from the best `top_groups`.
  int64_t groups = 1, top_groups = 1;
  double capacity_factor = 0;  // 0: nothing is dropped
  // By which balance_experts() moves the biases; 0: there are none.
  double bias_rate = 0;
  // All tokens go to what it gives too, whose output is added: `shared`, whole
  // on every rank.
  std::optional<wrappers::ExpertFn> shared = {};
};

class MoEImpl : public torch::nn::Module {
 public:
  // expert_fn: gives a new expert each time. `ranks` outlives the module.
  MoEImpl(int64_t hidden, int64_t experts, int64_t k,
          const wrappers::ExpertFn& expert_fn, const mesh::DeviceMesh& mesh,
          comm::Communicator& ranks, const MoEOptions& options = {});

  MoEOutput forward(const at::Tensor& x);
  // Choices of the last forward that were beyond a capacity: a number, int64.
  const at::Tensor& dropped() const { return dropped_; }
  // Every rank of its stage calls it once an update: each bias moves by
  // bias_rate, up where fewer chose its expert than the mean, of what all ranks
  // routed in training since the last call. Comm: an all_reduce of E numbers
  // over the ranks with other data; without biases none.
  void move_bias();
  void forget_load() { load_ = at::Tensor(); }

  int64_t experts() const { return router_.experts; }
  int64_t k() const { return router_.top_k; }
  // Ranks that share the experts out.
  const std::vector<int64_t>& peers() const { return experts_->peers(); }
  // Whether gradients are whole where ranks that hold the same take their mean:
  // else fully_shard() alone adds up what belongs together.
  bool has_whole_gradients() const { return peers() == pieces_; }
  bool has_biases() const { return bias_.defined(); }
  // Elements of the parameters of the gate, of what is shared and of all
  // experts, wherever these are; and of those that one token goes through.
  int64_t num_parameters() const { return count(experts()); }
  int64_t num_active_parameters() const { return count(k()); }

  // Biases stay in fp32 or wider.
  void to(torch::Device device, torch::Dtype dtype,
          bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 private:
  void move(const std::function<void()>& module);
  at::Tensor balance(const nn::Routing& routing, int64_t samples) const;
  at::Tensor places_of(const at::Tensor& choices, int64_t samples);
  at::Tensor mixed_in_pieces(const at::Tensor& tokens,
                             const at::Tensor& weights,
                             const at::Tensor& places);
  at::Tensor mixed(const at::Tensor& tokens, const at::Tensor& weights,
                   const at::Tensor& places);
  at::Tensor run(const at::Tensor& rows, const at::Tensor& counts);
  comm::Group& group(comm::Group*& of, const std::vector<int64_t>& peers,
                     const char* name);
  int64_t count(int64_t experts) const;

  nn::RouterOptions router_;
  double capacity_factor_, bias_rate_;
  // That send a piece each of the same tokens, this one alone where none do;
  // and that see other data.
  std::vector<int64_t> pieces_, data_;
  comm::Communicator& ranks_;
  // Of these, from their first use on.
  comm::Group *exchange_ = nullptr, *piece_group_ = nullptr,
              *data_group_ = nullptr;
  torch::nn::Linear gate_;
  std::shared_ptr<wrappers::LocalExperts> experts_;
  wrappers::Expert shared_;
  int64_t shared_parameters_ = 0;
  at::Tensor bias_;     // (E), or undefined
  at::Tensor load_;     // (E) int64, since the last move
  at::Tensor dropped_;  // ()
};
TORCH_MODULE(MoE);

namespace wrappers {

// By name, the module itself as "".
std::vector<std::pair<std::string, MoEImpl*>> mixtures_of(
    torch::nn::Module& module);

}  // namespace wrappers

// Moves the biases of every MoE in the module, behind an optimizer's step, or
// forgets what they would be moved by, where it was skipped. initialize()'s
// engine calls them by itself.
void balance_experts(torch::nn::Module& module);
void forget_loads(torch::nn::Module& module);

}  // namespace tessera

// Data parallelism on threads, around device 0 (mesh.data_parallel: dp): what
// each instruction does on every device.
//
// Comm: none; devices are threads of this process, and copies go between them.
#pragma once

#include <memory>
#include <vector>

#include "tessera/comm/flat_gradients.h"
#include "tessera/engine/model_actor.h"
#include "tessera/wrappers/replicas.h"

namespace tessera::engine {

class StarActor final : public ModelActor {
 public:
  // `models[0]` is the one that is trained; the others have its shape.
  StarActor(std::vector<std::shared_ptr<models::Model>> models,
            parallel::Composed& composed, optim::Optimizer* optimizer,
            comm::Group& world, const GradientRules& rules);

  Traffic traffic() const override;
  void begin_program(StepInput input, int64_t num_microbatches,
                     program::Purpose purpose,
                     std::optional<StepInput> next = {}) override;

  void replicate_parameters() override;
  void zero_gradients() override;
  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t microbatch) override;
  void load_documents(int64_t /*microbatch*/) override {}  // with the inputs
  void forward(int64_t microbatch, int64_t unit) override;
  void loss(int64_t microbatch) override;
  void backward(program::Op part, int64_t microbatch, int64_t unit) override;
  void reduce_replicas() override;

 private:
  // What a device has of the micro-batch that it is at.
  struct Device {
    data::Batch batch;
    at::Tensor output;
    at::Tensor gradient;  // of the output
    nn::Balance balance;
    nn::LossSum loss;
  };
  Traffic so_far() const;
  // On every device, on its own thread; an evaluation is device 0's alone.
  void on_devices(const std::function<void(size_t)>& work);

  std::vector<std::shared_ptr<models::Model>> models_;
  wrappers::Replicas replicas_;
  // Of a step, of the devices behind the first: in the type of its gradients,
  // where autograd would take the parameters'.
  // By device, behind device 0's, and by type.
  std::vector<std::vector<comm::FlatGradients>> gradients_;
  Traffic before_;  // of the steps before
  std::vector<Device> devices_;
};

}  // namespace tessera::engine

// Runs the program of a pipeline around modules of a user's own: what each of
// its instructions does to the tensors of micro-batches.
//
// Units:  of a program that runs here unit u is virtual stage u, as a whole.
// Split:  in two parts a backward is taken apart on autograd's graph
//         (split_backward.h); in the first stage, whose input needs no
//         gradient, all of it is the weights' part.
// Shapes: what comes from another stage is announced, before each message of
//         activations, in the first program that has inputs of new sizes; from
//         then on receives are posted before that. What a stage gives is
//         compared with what it announced.
// Comm:   see pipeline.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/program/executor.h"
#include "tessera/wrappers/detail/split_backward.h"
#include "tessera/wrappers/pipeline.h"

namespace tessera::wrappers {

// Sizes and type of a tensor.
struct Shape {
  std::vector<int64_t> sizes;
  at::ScalarType type = at::kFloat;
  bool operator==(const Shape&) const = default;

  static Shape of(const at::Tensor& tensor);
  at::Tensor empty() const;
  // Whether its gradient goes back.
  bool is_differentiable() const;
  std::string text() const;
};

// Of what goes from a stage to the next, as numbers that fit in one message.
struct Shapes {
  std::vector<Shape> all;
  bool operator==(const Shapes&) const = default;

  static Shapes of(const Tensors& tensors);
  at::Tensor to_message() const;
  static Shapes from_message(const at::Tensor& message);
  static at::Tensor empty_message();
  std::string text() const;
};

class StageActor : public program::Actor {
 public:
  // Outlive the result.
  StageActor(const std::vector<PipelineStage>& stages,
             const program::Pipeline& pipeline, comm::Group& ranks,
             const ScheduleOptions& options);

  // Before a program runs; `announces`: inputs have sizes that are new.
  void begin_program(const at::Tensor& inputs, const at::Tensor& targets,
                     bool trains, bool announces);
  // Behind it: nothing is left of micro-batches but this.
  Schedule::Result end_program();

  void load_inputs(int64_t microbatch) override;
  void load_targets(int64_t /*microbatch*/) override {}
  void forward(int64_t microbatch, int64_t unit) override;
  void loss(int64_t microbatch) override;
  void backward(program::Op part, int64_t microbatch, int64_t unit) override;
  void begin(const program::Instruction& message, bool awaited_next) override;
  void await(const program::Instruction& message) override;
  void hand_activations(int64_t microbatch, int64_t chunk) override;
  void hand_gradients(int64_t microbatch, int64_t chunk) override;

 private:
  // A micro-batch in a chunk.
  struct Passed {
    Tensors inputs, outputs;
    Tensors gradients;  // of the outputs that are differentiable
    at::Tensor loss;
    std::optional<PutOffGradients> later;  // of a backward in two parts
  };
  struct Message {
    Tensors tensors;
    std::vector<comm::Work> works;
    at::Tensor header;
    comm::Work header_work;
    void wait();
  };
  // Of a backward: their gradients; undefined: 1.
  struct Starts {
    Tensors tensors, gradients;
  };
  using Key = std::tuple<program::Op, int64_t, int64_t>;

  static Starts take_starts(Passed& here);
  void go_back(const PipelineStage& stage, const Starts& from);
  Passed& at(int64_t microbatch, int64_t chunk) {
    return passed_[{microbatch, chunk}];
  }
  int64_t chunk_of(int64_t unit) const {
    return pipeline_.place_of(unit).chunk;
  }
  at::Tensor part_of(const at::Tensor& batch, int64_t microbatch) const;
  void require_announced(const Tensors& outputs, int64_t chunk);
  static Tensors input_gradients(const Passed& here);
  void send(const program::Instruction& message, const program::Ends& ends,
            Message& sent);
  void receive(const program::Instruction& message, const program::Ends& ends,
               Message& received);
  program::Ends ends_of(const program::Instruction& message) const;
  int64_t tag_of(const program::Instruction& message,
                 const program::Ends& ends) const;
  int64_t header_tag(const program::Instruction& message,
                     const program::Ends& ends) const;

  const std::vector<PipelineStage>& stages_;
  const program::Pipeline pipeline_;
  comm::Group& ranks_;
  const ScheduleOptions& options_;
  at::Tensor inputs_, targets_;
  bool trains_ = false, announces_ = false;
  std::map<std::pair<int64_t, int64_t>, Passed> passed_;
  std::map<Key, Message> messages_;
  std::vector<Message> sent_;                // while shapes are announced
  std::map<int64_t, Shapes> given_, taken_;  // by chunk: outputs, inputs
  std::map<int64_t, at::Tensor> outputs_;    // of the last stage
  std::map<int64_t, int64_t> went_back_;     // by stage: micro-batches
  double loss_sum_ = 0;
  int64_t losses_ = 0;
};

}  // namespace tessera::wrappers

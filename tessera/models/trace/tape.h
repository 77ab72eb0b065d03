// What autograd would hold and free, without tensors: sizes alone.
//
// A Memory counts its bytes on the tape while anybody holds it, as a tensor's
// storage does; a Traced is a tensor: its memory and the node that made it. A
// function that is written with the same variables as the one that computes
// therefore has the same bytes alive, and the same most, at every place.
// Nodes run as LibTorch's engine runs them: the youngest first; what arrives
// for a node is added up in place where nobody else holds it.
// Beside bytes, floating-point operations and collectives, by direction.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/program/facts.h"

namespace tessera::models::trace {

class Tape;

class Storage {
 public:
  Storage(Tape& tape, int64_t bytes);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  int64_t bytes() const { return bytes_; }
  // Who holds it holds nothing.
  void let_go() const;

 private:
  Tape& tape_;
  mutable int64_t bytes_;
};
using Memory = std::shared_ptr<const Storage>;

struct Node;

struct Traced {
  Memory memory;
  int64_t numel = 0;
  std::shared_ptr<Node> node;  // null: no gradient is asked for
  size_t number = 0;           // of the node's outputs
  // Bytes that its node takes beside it to make it again, where no product
  // keeps it (nn/detail/remade.h); -1: it is kept.
  int64_t again_beside = -1;
};

// The gradient of the output -> those of the inputs, null where none is.
using Backward = std::function<std::vector<Memory>(const Memory& gradient)>;
// Of several outputs.
using BackwardOfAll =
    std::function<std::vector<Memory>(const std::vector<Memory>& gradients)>;

struct Output {
  Memory memory;
  int64_t numel = 0;
};

class Tape {
 public:
  explicit Tape(bool records) : records_(records) {}

  Memory allocate(int64_t bytes) {
    return std::make_shared<Storage>(*this, bytes);
  }
  bool records() const { return records_; }
  void set_records(bool records) { records_ = records; }

  // A tensor whose gradient is asked for: a unit's input.
  Traced leaf(int64_t numel, int64_t bytes);
  Traced leaf(int64_t numel, Memory memory);
  // Its gradient, after backward().
  Memory gradient_of(const Traced& leaf) const;
  // The same, which the leaf then no longer holds.
  Memory take_gradient(const Traced& leaf);
  // Parameters: their gradients are added to memory that is not counted here.
  Traced parameter(int64_t numel);
  // From now on parameters have no gradients.
  void set_frozen(bool frozen) { frozen_ = frozen; }
  bool is_frozen() const { return frozen_; }
  // Of parameters and of their gradients.
  void set_types(at::ScalarType compute, at::ScalarType gradient) {
    compute_ = compute;
    gradient_ = gradient;
  }
  // That all of it lies on.
  void set_device(c10::DeviceType device) { device_ = device; }
  c10::DeviceType device() const { return device_; }
  at::ScalarType compute() const { return compute_; }
  at::ScalarType gradient() const { return gradient_; }
  bool mixes_types() const { return compute_ != gradient_; }

  // The output of an operator of `inputs`, which keeps `saved` until its
  // backward, if anything is recorded.
  Traced record(Memory output, int64_t numel, const std::vector<Traced>& inputs,
                std::vector<Memory> saved, Backward backward);
  // Of one with several outputs.
  std::vector<Traced> record_all(const std::vector<Output>& outputs,
                                 const std::vector<Traced>& inputs,
                                 std::vector<Memory> saved,
                                 BackwardOfAll backward);
  // REQUIRES: `gradient` for each of `roots`; their holders keep both.
  void backward(const std::vector<Traced>& roots,
                const std::vector<Memory>& gradients);

  // Micro-batches of a step, whose rows may wait for each other.
  void set_batches(int64_t batches) { batches_ = batches; }
  int64_t batches() const { return batches_; }
  // The first of them: its rows wait from here on, and are not multiplied.
  void set_first() { is_first_ = true; }
  bool is_first() const { return is_first_; }
  void keep(Memory waiting) { waiting_.push_back(std::move(waiting)); }

  // From now on a backward leaves weights' gradients to a second part.
  void set_puts_off(bool puts_off) { puts_off_ = puts_off; }
  bool puts_off() const { return puts_off_; }
  // A product of that part, and what it holds until then.
  void put_off(std::vector<Memory> held, std::function<void()> product);
  void run_put_off();

  void forward_flops(program::Flops flops) { add(forward, flops); }
  void input_flops(program::Flops flops) { add(backward_input, flops); }
  void weight_flops(program::Flops flops) { add(backward_weight, flops); }
  void collective(const std::string& verb, const std::vector<mesh::Axis>& axes,
                  int64_t bytes);

  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = now_; }

  program::Flops forward, backward_input, backward_weight;
  std::vector<program::MatrixProduct> products;
  std::vector<program::InnerCollective> forward_collectives,
      backward_collectives;

 private:
  friend class Storage;
  static void add(program::Flops& sum, const program::Flops& more) {
    sum.matmul += more.matmul;
    sum.attention += more.attention;
  }
  void count(int64_t bytes);
  void arrive(Node& node, size_t number, Memory gradient);

  bool records_;
  bool in_backward_ = false, frozen_ = false, puts_off_ = false;
  bool is_first_ = false;
  struct PutOff {
    std::vector<Memory> held;
    std::function<void()> product;
  };
  std::vector<PutOff> put_off_;
  std::vector<Memory> waiting_;
  int64_t now_ = 0, peak_ = 0;
  int64_t nodes_ = 0, batches_ = 1;
  at::ScalarType compute_ = at::kFloat, gradient_ = at::kFloat;
  c10::DeviceType device_ = c10::kCPU;
};

}  // namespace tessera::models::trace

#include "tessera/models/trace/tape.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera::models::trace {

struct Node {
  enum class Kind { kOperator, kLeaf, kParameter };
  Kind kind = Kind::kOperator;
  int64_t age = 0;    // the younger the larger
  int64_t numel = 0;  // of a leaf or a parameter
  struct Edge {
    std::shared_ptr<Node> node;
    size_t number;
  };
  std::vector<Edge> inputs;
  std::vector<Memory> saved;
  BackwardOfAll backward;
  std::vector<Memory> arrived = {nullptr};  // by output
};

Storage::Storage(Tape& tape, int64_t bytes) : tape_(tape), bytes_(bytes) {
  tape_.count(bytes_);
}

Storage::~Storage() { tape_.count(-bytes_); }

void Tape::count(int64_t bytes) {
  now_ += bytes;
  peak_ = std::max(peak_, now_);
}

void Storage::let_go() const {
  tape_.count(-bytes_);
  bytes_ = 0;
}

Traced Tape::leaf(int64_t numel, int64_t bytes) {
  return leaf(numel, allocate(bytes));
}

Traced Tape::leaf(int64_t numel, Memory memory) {
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::kLeaf;
  node->numel = numel;
  return {std::move(memory), numel, std::move(node)};
}

Memory Tape::gradient_of(const Traced& leaf) const {
  return leaf.node->arrived.front();
}

Memory Tape::take_gradient(const Traced& leaf) {
  return std::exchange(leaf.node->arrived.front(), nullptr);
}

Traced Tape::parameter(int64_t numel) {
  if (frozen_) return {nullptr, numel, nullptr};
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::kParameter;
  node->numel = numel;
  return {nullptr, numel, std::move(node)};
}

Traced Tape::record(Memory output, int64_t numel,
                    const std::vector<Traced>& inputs,
                    std::vector<Memory> saved, Backward backward) {
  return record_all({{std::move(output), numel}}, inputs, std::move(saved),
                    [backward = std::move(backward)](
                        const std::vector<Memory>& gradients) {
                      return backward(gradients.front());
                    })
      .front();
}

std::vector<Traced> Tape::record_all(const std::vector<Output>& outputs,
                                     const std::vector<Traced>& inputs,
                                     std::vector<Memory> saved,
                                     BackwardOfAll backward) {
  const bool follows = std::ranges::any_of(
      inputs, [](const Traced& input) { return input.node != nullptr; });
  std::shared_ptr<Node> node;
  if (records_ && follows) {
    node = std::make_shared<Node>();
    node->age = ++nodes_;
    for (const Traced& input : inputs) {
      node->inputs.push_back({input.node, input.number});
    }
    node->saved = std::move(saved);
    node->backward = std::move(backward);
    node->arrived.resize(outputs.size());
  }
  std::vector<Traced> traced;
  for (const Output& output : outputs) {
    traced.push_back({output.memory, output.numel, node, traced.size()});
  }
  return traced;
}

void Tape::arrive(Node& node, size_t number, Memory gradient) {
  if (node.kind == Node::Kind::kParameter) {
    if (puts_off_) {
      const int64_t numel = node.numel;
      return put_off({std::move(gradient)}, [this, numel] {
        if (mixes_types()) allocate(numel * 4);
      });
    }
    // Added to what is there, in the wider of the two types.
    if (mixes_types()) allocate(node.numel * 4);
    return;
  }
  Memory& arrived = node.arrived.at(number);
  if (arrived == nullptr) {
    arrived = std::move(gradient);
    return;
  }
  if (arrived.use_count() == 1) return;  // added in place
  arrived = allocate(arrived->bytes());
}

void Tape::backward(const std::vector<Traced>& roots,
                    const std::vector<Memory>& gradients) {
  const bool is_inner = std::exchange(in_backward_, true);
  // A node that has all its gradients is older than all that gave them.
  std::map<int64_t, std::shared_ptr<Node>> ready;
  const auto give = [&](const Node::Edge& to, Memory gradient) {
    arrive(*to.node, to.number, std::move(gradient));
    if (to.node->kind == Node::Kind::kOperator) {
      ready.emplace(to.node->age, to.node);
    }
  };
  for (size_t i = 0; i < roots.size(); ++i) {
    if (roots[i].node != nullptr) {
      give({roots[i].node, roots[i].number}, gradients[i]);
    }
  }
  while (!ready.empty()) {
    const std::shared_ptr<Node> node = std::prev(ready.end())->second;
    ready.erase(std::prev(ready.end()));
    std::vector<Memory> arrived(node->arrived.size());
    arrived.swap(node->arrived);
    std::vector<Memory> outputs = node->backward(arrived);
    arrived.clear();
    node->saved.clear();
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i] == nullptr || node->inputs[i].node == nullptr) continue;
      give(node->inputs[i], std::exchange(outputs[i], nullptr));
    }
  }
  in_backward_ = is_inner;
}

void Tape::put_off(std::vector<Memory> held, std::function<void()> product) {
  put_off_.push_back({std::move(held), std::move(product)});
}

void Tape::run_put_off() {
  for (PutOff& each : std::exchange(put_off_, {})) {
    each.product();
    each.held.clear();
  }
}

void Tape::collective(const std::string& verb,
                      const std::vector<mesh::Axis>& axes, int64_t bytes) {
  (in_backward_ ? backward_collectives : forward_collectives)
      .push_back({verb, axes, bytes});
}

}  // namespace tessera::models::trace

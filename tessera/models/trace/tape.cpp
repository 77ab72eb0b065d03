#include "tessera/models/trace/tape.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace tessera::models::trace {

struct Node {
  enum class Kind { kOperator, kLeaf, kParameter };
  Kind kind = Kind::kOperator;
  int64_t age = 0;  // the younger the larger
  int64_t numel = 0;
  std::vector<std::shared_ptr<Node>> inputs;
  std::vector<Memory> saved;
  Backward backward;
  Memory arrived;
};

Storage::Storage(Tape& tape, int64_t bytes) : tape_(tape), bytes_(bytes) {
  tape_.count(bytes_);
}

Storage::~Storage() { tape_.count(-bytes_); }

void Tape::count(int64_t bytes) {
  now_ += bytes;
  peak_ = std::max(peak_, now_);
}

Traced Tape::leaf(int64_t numel, int64_t bytes) {
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::kLeaf;
  node->numel = numel;
  return {allocate(bytes), numel, std::move(node)};
}

Memory Tape::gradient_of(const Traced& leaf) const {
  return leaf.node->arrived;
}

Traced Tape::parameter(int64_t numel) {
  if (frozen_) return {nullptr, numel, nullptr};
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::kParameter;
  node->numel = numel;
  return {nullptr, numel, std::move(node)};
}

Traced Tape::record(Memory output, int64_t numel, std::vector<Traced> inputs,
                    std::vector<Memory> saved, Backward backward) {
  const bool follows = std::ranges::any_of(
      inputs, [](const Traced& input) { return input.node != nullptr; });
  if (!records_ || !follows) return {std::move(output), numel, nullptr};
  auto node = std::make_shared<Node>();
  node->age = ++nodes_;
  node->numel = numel;
  for (const Traced& input : inputs) node->inputs.push_back(input.node);
  node->saved = std::move(saved);
  node->backward = std::move(backward);
  return {std::move(output), numel, std::move(node)};
}

void Tape::arrive(Node& node, Memory gradient) {
  if (node.kind == Node::Kind::kParameter) {
    // Added to what is there, in the wider of the two types.
    if (mixed_bytes_ > 0) allocate(node.numel * mixed_bytes_);
    return;
  }
  if (node.arrived == nullptr) {
    node.arrived = std::move(gradient);
    return;
  }
  if (node.arrived.use_count() == 1) return;  // added in place
  node.arrived = allocate(node.arrived->bytes());
}

void Tape::backward(const std::vector<Traced>& roots,
                    const std::vector<Memory>& gradients) {
  in_backward_ = true;
  // A node that has all its gradients is older than all that gave them.
  std::map<int64_t, std::shared_ptr<Node>> ready;
  const auto give = [&](const std::shared_ptr<Node>& node, Memory gradient) {
    arrive(*node, std::move(gradient));
    if (node->kind == Node::Kind::kOperator) ready.emplace(node->age, node);
  };
  for (size_t i = 0; i < roots.size(); ++i) {
    if (roots[i].node != nullptr) give(roots[i].node, gradients[i]);
  }
  while (!ready.empty()) {
    const std::shared_ptr<Node> node = std::prev(ready.end())->second;
    ready.erase(std::prev(ready.end()));
    Memory gradient = std::exchange(node->arrived, nullptr);
    std::vector<Memory> outputs = node->backward(gradient);
    gradient = nullptr;
    node->saved.clear();
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i] == nullptr || node->inputs[i] == nullptr) continue;
      give(node->inputs[i], std::exchange(outputs[i], nullptr));
    }
  }
  in_backward_ = false;
}

void Tape::collective(const std::string& verb,
                      const std::vector<mesh::Axis>& axes, int64_t bytes) {
  (in_backward_ ? backward_collectives : forward_collectives)
      .push_back({verb, axes, bytes});
}

}  // namespace tessera::models::trace

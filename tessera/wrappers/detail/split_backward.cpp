#include "tessera/wrappers/detail/split_backward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/core/log.h"

namespace tessera::wrappers {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// Those whose backward makes no gradient that nobody asks for: its time falls
// into two parts.
bool is_product(const Node& node) {
  constexpr std::string_view kProducts[] = {
      "AddmmBackward",   "MmBackward",           "BmmBackward",
      "BaddbmmBackward", "AddmvBackward",        "MvBackward",
      "LinearBackward",  "MkldnnLinearBackward", "ConvolutionBackward"};
  const std::string name = node.name();
  return std::ranges::any_of(
      kProducts, [&](std::string_view each) { return name.starts_with(each); });
}

// What would run in both parts.
bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

// The graph from a module's outputs down: which nodes are on the way to its
// inputs, and where edges leave that way, to parameters.
class Graph {
 public:
  Graph(const edge_list& roots, const edge_list& inputs) {
    for (const Edge& each : inputs) leads_to_[each.function.get()] = true;
    for (const Edge& each : roots) {
      Node* root = each.function.get();
      if (leads_to_.try_emplace(root, false).second) walk(root);
    }
  }

  bool leads_to_input(Node* node) const {
    const auto found = leads_to_.find(node);
    return found != leads_to_.end() && found->second;
  }
  // On the way, with edges that leave it.
  const std::vector<Node*>& borders() const { return borders_; }

  std::vector<Edge> leaving(const Node* node) const {
    std::vector<Edge> edges;
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid() && !leads_to_input(edge.function.get())) {
        edges.push_back(edge);
      }
    }
    return edges;
  }

 private:
  // Deep graphs: no recursion.
  void walk(Node* root) {
    struct Visit {
      Node* node;
      size_t next;
    };
    std::vector<Visit> path{{root, 0}};
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->next_edges().size()) {
        Node* below = node->next_edge(next++).function.get();
        if (below != nullptr && leads_to_.try_emplace(below, false).second) {
          path.push_back({below, 0});
        }
        continue;
      }
      close(node);
      path.pop_back();
    }
  }

  void close(Node* node) {
    bool leads = leads_to_.at(node), leaves = false;
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      const bool below = leads_to_.at(edge.function.get());
      leads = leads || below;
      leaves = leaves || !below;
    }
    leads_to_[node] = leads;
    if (leads && leaves) borders_.push_back(node);
  }

  std::map<Node*, bool> leads_to_;
  std::vector<Node*> borders_;
};

// Which borders wait with the gradients that leave them.
struct Split {
  std::set<Node*> late;
  std::set<Node*> early_targets;  // of the other borders' edges
};

Split split_of(const Graph& graph) {
  Split split;
  const auto make_early = [&](Node* border) {
    split.late.erase(border);
    for (const Edge& edge : graph.leaving(border)) {
      split.early_targets.insert(edge.function.get());
    }
  };
  for (Node* border : graph.borders()) {
    if (is_product(*border) && !has_hooks(*border)) {
      split.late.insert(border);
    } else {
      make_early(border);
    }
  }
  // Whoever shares a target with an early one is early too: what a target is
  // given comes in one part.
  for (bool changed = true; changed;) {
    changed = false;
    for (Node* border : graph.borders()) {
      const auto edges = graph.leaving(border);
      const bool shares = std::ranges::any_of(edges, [&](const Edge& edge) {
        return split.early_targets.contains(edge.function.get());
      });
      if (!shares || !split.late.contains(border)) continue;
      make_early(border);
      changed = true;
    }
  }
  return split;
}

// Whether one early target is computed on the way to another, which would be
// given its gradient in both parts.
bool is_twice_on_the_way(const Graph& graph, const Split& split) {
  std::set<Node*> seen;
  std::vector<Node*> open;
  for (Node* border : graph.borders()) {
    for (const Edge& edge : graph.leaving(border)) {
      if (seen.insert(edge.function.get()).second) {
        open.push_back(edge.function.get());
      }
    }
  }
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      if (split.early_targets.contains(edge.function.get())) return true;
      if (seen.insert(edge.function.get()).second) {
        open.push_back(edge.function.get());
      }
    }
  }
  return false;
}

// Empty, or why the backward runs whole.
std::string_view reason_for_whole(const Graph& graph, const Split& split) {
  if (split.late.empty() && !graph.borders().empty()) {
    return "it has no product whose weights' gradient could wait";
  }
  if (std::ranges::any_of(split.early_targets,
                          [](Node* each) { return has_hooks(*each); })) {
    return "hooks on its parameters would run twice";
  }
  if (is_twice_on_the_way(graph, split)) {
    return "parameters that others are made of are used in both parts";
  }
  return "";
}

// Of each reason once, whichever stage has it.
void tell_once(std::string_view reason) {
  static std::mutex mutex;
  static std::set<std::string_view> told;
  const std::lock_guard lock(mutex);
  if (!told.insert(reason).second) return;
  log::info("pipeline: the backward of a stage is not split, but runs whole: ",
            reason);
}

void erase_undefined(edge_list& roots, variable_list& gradients) {
  size_t kept = 0;
  for (size_t i = 0; i < roots.size(); ++i) {
    if (!gradients[i].defined()) continue;  // nothing came by here
    roots[kept] = roots[i];
    gradients[kept++] = gradients[i];
  }
  roots.resize(kept);
  gradients.resize(kept);
}

// Every input of these nodes, once.
edge_list starts_of(const Graph& graph, const Split& split) {
  edge_list starts;
  for (Node* border : graph.borders()) {
    if (split.late.contains(border)) {
      for (uint32_t i = 0; i < border->num_inputs(); ++i) {
        starts.emplace_back(border->getptr(), i);
      }
      continue;
    }
    for (const Edge& edge : graph.leaving(border)) {
      if (std::ranges::find(starts, edge) == starts.end()) {
        starts.push_back(edge);
      }
    }
  }
  return starts;
}

// From here on late ones give their parameters alone, and hold nothing of the
// graph on the way to the input.
void cut_off_the_way(const Graph& graph, const Split& split) {
  for (Node* late : split.late) {
    for (Edge& edge : late->next_edges()) {
      if (edge.is_valid() && graph.leads_to_input(edge.function.get())) {
        edge = Edge();
      }
    }
  }
}

}  // namespace

PutOffGradients backward_to_inputs(const std::vector<at::Tensor>& ends,
                                   const std::vector<at::Tensor>& gradients,
                                   const std::vector<at::Tensor>& inputs) {
  edge_list roots, to;
  for (const auto& each : ends) {
    roots.push_back(torch::autograd::impl::gradient_edge(each));
  }
  for (const auto& each : inputs) {
    to.push_back(torch::autograd::impl::gradient_edge(each));
  }
  const Graph graph(roots, to);
  const Split split = split_of(graph);
  PutOffGradients later;
  const auto leads = [&](const Edge& root) {
    return graph.leads_to_input(root.function.get());
  };
  auto reason = reason_for_whole(graph, split);
  // What such an output leads to would be gone through in both parts.
  if (std::ranges::any_of(roots, leads) && !std::ranges::all_of(roots, leads)) {
    reason = "one of its outputs does not depend on its inputs";
  }
  if (!reason.empty()) tell_once(reason);
  if (!reason.empty() || std::ranges::none_of(roots, leads)) {
    torch::autograd::backward(ends, gradients);
    return later;
  }
  later.roots_ = starts_of(graph, split);
  edge_list outputs = later.roots_;
  outputs.insert(outputs.end(), to.begin(), to.end());
  variable_list given;
  for (size_t i = 0; i < ends.size(); ++i) {
    given.push_back(gradients[i].defined() ? gradients[i]
                                           : at::ones_like(ends[i]));
  }
  later.gradients_ = Engine::get_default_engine().execute(
      roots, given, /*keep_graph=*/true, /*create_graph=*/false,
      /*accumulate_grad=*/false, outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i].mutable_grad() = later.gradients_[later.roots_.size() + i];
  }
  later.gradients_.resize(later.roots_.size());
  erase_undefined(later.roots_, later.gradients_);
  cut_off_the_way(graph, split);
  return later;
}

void PutOffGradients::run() {
  const auto roots = std::exchange(roots_, {});
  const auto gradients = std::exchange(gradients_, {});
  if (roots.empty()) return;
  Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false,
                                       /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

}  // namespace tessera::wrappers

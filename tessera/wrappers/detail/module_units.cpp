#include "tessera/wrappers/detail/module_units.h"

#include <fnmatch.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "tessera/core/edit_distance.h"
#include "tessera/core/error.h"
#include "tessera/wrappers/moe.h"

namespace tessera::wrappers {
namespace {

using torch::nn::Module;

using Named = NamedModule;

bool is_container(const Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) ||
         dynamic_cast<const torch::nn::SequentialImpl*>(&module);
}

bool has_parameters(const Module& module) {
  return !module.parameters().empty();
}

std::vector<Named> children_of(const Named& of) {
  std::vector<Named> children;
  for (const auto& child : of.module->named_children()) {
    const std::string prefix = of.name.empty() ? "" : of.name + ".";
    if (has_parameters(*child.value())) {
      children.push_back({prefix + child.key(), child.value().get()});
    }
  }
  return children;
}

void elements_of_containers(const Named& below, std::vector<Named>& found) {
  if (is_container(*below.module)) {
    const auto elements = children_of(below);
    found.insert(found.end(), elements.begin(), elements.end());
    return;
  }
  for (const auto& child : children_of(below)) {
    elements_of_containers(child, found);
  }
}

void all_below(const Named& root, std::vector<Named>& found) {
  for (const auto& child : children_of(root)) {
    found.push_back(child);
    all_below(child, found);
  }
}

std::vector<Named> modules_of_units(Module& root,
                                    const std::vector<std::string>& patterns) {
  const Named whole{"", &root};
  std::vector<Named> found;
  if (patterns.empty()) {
    elements_of_containers(whole, found);
    if (found.empty()) found = children_of(whole);
  } else {
    found = modules_matching(root, patterns, "fully_shard");
  }
  // Shared out over other ranks than the rest; outer ones still come first.
  std::vector<Named> all;
  all_below(whole, all);
  for (const auto& each : all) {
    if (!dynamic_cast<const LocalExperts*>(each.module)) continue;
    const auto inner = std::ranges::find_if(found, [&](const Named& other) {
      return other.name.starts_with(each.name + ".");
    });
    found.insert(inner, each);
  }
  return found;
}

// What is protected there.
struct Parameters : Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(Module& module) {
    return module.*(&Parameters::parameters_);
  }
};

// Name by name, as paths are matched: "blocks.*" are the blocks, and not what
// they are made of.
bool matches(const std::string& pattern, const Named& each) {
  const auto as_path = [](std::string name) {
    std::ranges::replace(name, '.', '/');
    return name;
  };
  return fnmatch(as_path(pattern).c_str(), as_path(each.name).c_str(),
                 FNM_PATHNAME) == 0;
}

}  // namespace

bool has_match(Module& root, const std::string& pattern) {
  std::vector<Named> all;
  all_below({"", &root}, all);
  return std::ranges::any_of(
      all, [&](const Named& each) { return matches(pattern, each); });
}

// An outer one before those inside of it.
std::vector<NamedModule> modules_matching(
    Module& root, const std::vector<std::string>& patterns,
    const std::string& who) {
  std::vector<Named> all, found;
  all_below({"", &root}, all);
  for (const auto& pattern : patterns) {
    std::string nearest;
    for (const auto& each : all) {
      if (nearest.empty() ||
          edit_distance(pattern, each.name) < edit_distance(pattern, nearest)) {
        nearest = each.name;
      }
    }
    TS_CHECK_CONFIG(has_match(root, pattern), who, ": \"", pattern,
                    "\" names no child module that has parameters; ",
                    nearest.empty() ? "there is none."
                                    : "the nearest is \"" + nearest + "\".");
  }
  for (const auto& each : all) {
    if (std::ranges::any_of(patterns, [&](const std::string& pattern) {
          return matches(pattern, each);
        })) {
      found.push_back(each);
    }
  }
  return found;
}

std::vector<ModuleUnit> units_of(Module& root,
                                 const std::vector<std::string>& patterns) {
  std::vector<ModuleUnit> units = {{""}};
  // Outer units come first, so that inner ones take theirs from them; who has
  // it already and does not contain this one shares it.
  std::unordered_map<const c10::TensorImpl*, size_t> owner_of;
  std::vector<std::string> names = {""};
  const auto contains = [](const std::string& outer, const std::string& inner) {
    return outer.empty() || inner.starts_with(outer + ".");
  };
  std::unordered_map<const c10::TensorImpl*, bool> shared;
  for (const auto& [name, module] : modules_of_units(root, patterns)) {
    const bool known = std::ranges::count(names, name) > 0;
    if (known) continue;
    names.push_back(name);
    for (const auto& parameter : module->parameters()) {
      const auto* impl = parameter.unsafeGetTensorImpl();
      const auto [found, is_new] = owner_of.try_emplace(impl, names.size() - 1);
      if (is_new) continue;
      if (!contains(names[found->second], name)) shared[impl] = true;
      found->second = names.size() - 1;
    }
  }
  std::map<size_t, size_t> unit_at;  // by place in `names`: in `units`
  unit_at[0] = 0;
  auto parameters = nn::parameters_of(root);
  for (size_t place = 1; place < names.size(); ++place) {
    const bool owns = std::ranges::any_of(parameters, [&](const auto& each) {
      const auto* impl = each.tensor.unsafeGetTensorImpl();
      const auto found = owner_of.find(impl);
      return found != owner_of.end() && found->second == place &&
             !shared.contains(impl);
    });
    if (!owns) continue;
    unit_at[place] = units.size();
    units.push_back({names[place]});
  }
  for (auto& parameter : parameters) {
    const auto* impl = parameter.tensor.unsafeGetTensorImpl();
    const auto found = owner_of.find(impl);
    const bool is_own = found != owner_of.end() && !shared.contains(impl);
    const size_t unit = is_own ? unit_at.at(found->second) : 0;
    units[unit].parameters.push_back(std::move(parameter));
  }
  return units;
}

void replace_parameters(Module& root, const std::vector<at::Tensor>& originals,
                        const std::vector<at::Tensor>& replacements) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> by;
  for (size_t i = 0; i < originals.size(); ++i) {
    by[originals[i].unsafeGetTensorImpl()] = replacements[i];
  }
  for (const auto& module : root.modules(/*include_self=*/false)) {
    for (auto& item : Parameters::of(*module)) {
      const auto found = by.find(item.value().unsafeGetTensorImpl());
      if (found != by.end()) item.value() = found->second;
    }
  }
  for (auto& item : Parameters::of(root)) {
    const auto found = by.find(item.value().unsafeGetTensorImpl());
    if (found != by.end()) item.value() = found->second;
  }
}

}  // namespace tessera::wrappers

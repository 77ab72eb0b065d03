// The units of a user's module: which of its parameters are gathered and
// reduced as one.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tessera/nn/parameter.h"

namespace tessera::wrappers {

struct ModuleUnit {
  std::string name;  // of the child module; of the first: ""
  std::vector<nn::Parameter> parameters;
};

// Each parameter once: with the innermost unit that it lies in. The first unit
// is the module itself: it has those that lie in no other, or in several.
// `patterns`: globs of the names of child modules, as fnmatch(3) reads paths,
// with dots for slashes.
// None: the elements of every outermost ModuleList, ModuleDict or Sequential;
// of a module without one, its children. The experts of each MoE are one of
// their own always. Units without parameters are left out.
// Errors: a pattern that names no child module with parameters.
std::vector<ModuleUnit> units_of(torch::nn::Module& root,
                                 const std::vector<std::string>& patterns);

struct NamedModule {
  std::string name;
  torch::nn::Module* module;
};

// The child modules with parameters that some pattern names, in the order of
// declaration. Errors: as units_of(), by `who`.
std::vector<NamedModule> modules_matching(
    torch::nn::Module& root, const std::vector<std::string>& patterns,
    const std::string& who);
// Whether it names any.
bool has_match(torch::nn::Module& root, const std::string& pattern);

// Puts replacements[i] where the module has originals[i], as its parameters()
// and all that goes over them see it; members of its class stay what they are.
void replace_parameters(torch::nn::Module& root,
                        const std::vector<at::Tensor>& originals,
                        const std::vector<at::Tensor>& replacements);

}  // namespace tessera::wrappers

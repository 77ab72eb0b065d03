#include "tessera/wrappers/detail/memory_facts.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/parallel/data/parameter_facts.h"
#include "tessera/program/memory.h"

namespace tessera::wrappers {

using parallel::data::Bundle;
using program::ParameterFacts;
using program::Program;

namespace {

std::vector<ParameterFacts> facts_of(const Bundle& bundle,
                                     const mesh::DeviceMesh& mesh, int64_t rank,
                                     const FullyShardOptions& options) {
  std::vector<const nn::ParameterSpec*> specs;
  for (const auto& parameter : bundle.parameters) {
    specs.push_back(parameter.spec.get());
  }
  return parallel::data::parameter_facts(
      specs, mesh, mesh.coord_of(rank),
      {.zero_stage = bundle.is_sharded() ? bundle.stage : 0,
       .compute = options.compute_dtype.value_or(bundle.dtype),
       .gradient = options.reduce_dtype.value_or(bundle.dtype),
       .shard = bundle.dtype});
}

program::Facts without(program::Facts facts,
                       const std::vector<int64_t ParameterFacts::*>& bytes) {
  for (auto& owner : facts.units) {
    for (auto& each : owner.parameters) {
      for (const auto member : bytes) each.*member = 0;
    }
  }
  return facts;
}

int64_t sum(const program::Facts& facts, int64_t ParameterFacts::* bytes) {
  int64_t total = 0;
  for (const auto& owner : facts.units) {
    for (const auto& each : owner.parameters) total += each.*bytes;
  }
  return total;
}

}  // namespace

MemoryFacts memory_facts(const std::vector<std::vector<Bundle>>& owners,
                         const mesh::DeviceMesh& mesh, int64_t rank,
                         const FullyShardOptions& options) {
  MemoryFacts facts;
  for (const auto& bundles : owners) {
    program::UnitFacts owner;
    for (const auto& bundle : bundles) {
      const bool copies =
          options.reduce_dtype && *options.reduce_dtype != bundle.dtype;
      for (auto& each : facts_of(bundle, mesh, rank, options)) {
        if (!bundle.is_frozen) {
          facts.trained_elements += each.shard_elements;
          facts.copied_gradient_bytes +=
              copies ? each.shard_elements *
                           static_cast<int64_t>(c10::elementSize(bundle.dtype))
                     : 0;
        }
        owner.parameters.push_back(std::move(each));
      }
    }
    facts.owners.units.push_back(std::move(owner));
  }
  return facts;
}

// The peak of a kind is that of facts which have this kind alone.
ShardedMemory sharded_memory(const MemoryFacts& facts,
                             const PassPrograms& programs,
                             int64_t state_bytes) {
  TS_CHECK(state_bytes >= 0, "fully_shard: memory_plan() of ", state_bytes,
           " bytes an element.");
  Program step = programs.forward;
  for (const Program* next : {&programs.backward, &programs.completion}) {
    step.insert(step.end(), next->begin(), next->end());
  }
  const auto most = [&](const program::Facts& counted, int64_t copied) {
    return std::max(
        {program::memory_of(step, {}, counted).peak(),
         program::memory_of(programs.evaluation, {}, counted).peak(), copied});
  };
  const program::Facts parameters =
      without(facts.owners,
              {&ParameterFacts::whole_gradient_bytes,
               &ParameterFacts::reduce_work_bytes, &ParameterFacts::pack_bytes,
               &ParameterFacts::sum_message_bytes});
  const program::Facts gradients = without(
      facts.owners,
      {&ParameterFacts::gathered_bytes, &ParameterFacts::gather_work_bytes});
  const int64_t copied = facts.copied_gradient_bytes;
  return {
      .parameters = {.held =
                         sum(facts.owners, &ParameterFacts::parameter_bytes),
                     .beside = most(parameters, 0)},
      .gradients = {.held = sum(facts.owners, &ParameterFacts::gradient_bytes),
                    .beside = most(gradients, copied)},
      .optimizer = facts.trained_elements * state_bytes,
      .beside = most(facts.owners, copied)};
}

}  // namespace tessera::wrappers

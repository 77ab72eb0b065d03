// How a model is spread over a mesh: the sections of the configuration that
// strategies own, each beside its owner, in the order of the manual.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/parallel/context/context_config.h"
#include "tessera/parallel/data/matrix_pieces.h"
#include "tessera/parallel/data/zero_config.h"
#include "tessera/parallel/expert/expert_config.h"
#include "tessera/parallel/pipeline/pipeline_config.h"
#include "tessera/parallel/precision_config.h"
#include "tessera/parallel/recompute_config.h"
#include "tessera/parallel/tensor/tensor_config.h"

namespace tessera::parallel {

struct ParallelConfig {
  data::ZeroConfig zero;
  tensor::TensorConfig tensor;
  context::ContextConfig context;
  expert::ExpertConfig expert;
  pipeline::PipelineConfig pipeline;
  PrecisionConfig precision;
  RecomputeConfig recompute;
  // No sections: whoever has the optimizer says whether hidden matrices are
  // updated whole, whether in bf16, whatever precision.compute is, and in how
  // many steps.
  bool whole_matrices = false, orthogonalised_in_bf16 = false;
  int64_t orthogonal_steps = 5;
  data::UpdateOptions updates() const;
  // Puts what -1 stands for in its place.
  void resolve(bool ranks_share_memory);

  // For whoever has sections beside these.
  void declare_sections(config::Section& section) {
    section.section("zero", zero, "sharded data parallelism");
    section.section("tensor", tensor, "tensor parallelism");
    section.section("context", context, "context parallelism");
    section.section("expert", expert, "expert parallelism");
    section.section("pipeline", pipeline, "pipeline parallelism");
    section.section("precision", precision, "number types");
    section.section("recompute", recompute,
                    "activations that are computed again, not kept");
  }

  // The keys that mean something where nothing is trained.
  static std::vector<std::string> keys_of_evaluation() {
    return {"zero.stage",        "zero.expert_stage",
            "zero.expert_shard", "zero.reshard_after_forward",
            "zero.prefetch",     "tensor.sequence_parallel",
            "context.method",    "expert.dispatch_chunks",
            "pipeline.split"};
  }
};

}  // namespace tessera::parallel

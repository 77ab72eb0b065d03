#include "tessera/parallel/precision_config.h"

#include "tessera/core/error.h"

namespace tessera::parallel {

void PrecisionConfig::declare(config::Section& section) {
  section.key("compute", compute, "type of parameters and activations")
      .one_of({"fp64", "fp32", "bf16", "fp16"})
      .not_built({"fp16"}, "training in fp16", "bf16 or fp32");
  section
      .key("reduce", reduce,
           "type in which gradients are accumulated and summed over ranks; "
           "auto: fp32, or fp64 with precision.compute fp64")
      .one_of({"auto", "fp64", "fp32", "bf16", "fp16"})
      .not_built({"fp64", "fp16"}, "reducing in this type", "auto");
  section
      .key("loss_scale", loss_scale,
           "factor of the loss in fp16; 0: found while training")
      .at_least(0)
      .not_built("loss scaling");
}

void PrecisionConfig::check() const {
  TS_CHECK_CONFIG(
      reduce == "auto" || (reduce == "fp32" && compute != "fp64") ||
          reduce == compute,
      "precision.reduce is ", reduce, " and precision.compute ", compute,
      ": gradients are kept in fp32, or in the type of the weights. Use auto",
      compute == "bf16"   ? ", fp32 or bf16"
      : compute == "fp32" ? " or fp32"
                          : "",
      ".");
}

at::ScalarType PrecisionConfig::compute_dtype() const {
  if (compute == "fp64") return at::kDouble;
  if (compute == "bf16") return at::kBFloat16;
  TORCH_INTERNAL_ASSERT(compute == "fp32", "precision.compute ", compute);
  return at::kFloat;
}

at::ScalarType PrecisionConfig::gradient_dtype() const {
  if (reduce == "bf16") return at::kBFloat16;
  const at::ScalarType weights = compute_dtype();
  return weights == at::kBFloat16 ? at::kFloat : weights;
}

}  // namespace tessera::parallel

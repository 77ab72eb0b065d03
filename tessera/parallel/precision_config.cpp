#include "tessera/parallel/precision_config.h"

#include "tessera/core/error.h"

namespace tessera::parallel {
namespace {

// Scales that are numbers of fp32, as are those that they are divided by.
constexpr double kLeastScale = 0x1p-126, kMostScale = 0x1p127;

std::string complaint_about_scale(const config::Value& value) {
  const double scale = std::get<double>(value);
  return scale >= kLeastScale || scale == 0 || scale == -1
             ? ""
             : "it must be 2^-126 (1.18e-38) or more, 0 or -1";
}

}  // namespace

void PrecisionConfig::declare(config::Section& section) {
  section.key("compute", compute, "type of parameters and activations")
      .one_of({"fp64", "fp32", "bf16", "fp16"});
  section
      .key(
          "products", products,
          "of the linear layers of blocks, forward and for the gradient of "
          "what goes in; same: in precision.compute; fp8: of operands that are "
          "rounded to e4m3, each row by a scale of its own")
      .one_of({"same", "fp8"});
  section
      .key("reduce", reduce,
           "type in which gradients are accumulated and summed over ranks; "
           "auto: fp32, or fp64 with precision.compute fp64")
      .one_of({"auto", "fp64", "fp32", "bf16", "fp16"});
  section
      .key("loss_scale", loss_scale,
           "factor of the loss, whose gradients are divided by it; 0: found "
           "while training; -1: 0 with precision.compute fp16, else 1")
      .check(complaint_about_scale)
      .at_most(kMostScale);
  section
      .key("initial_loss_scale", initial_loss_scale,
           "that loss_scale 0 begins with")
      .at_least(kLeastScale)
      .at_most(kMostScale);
  section
      .key("scale_growth_interval", scale_growth_interval,
           "finite gradients in a row that double the loss scale")
      .at_least(1);
  section
      .key("scale_hysteresis", scale_hysteresis,
           "how many gradients must not be finite for the loss scale to be "
           "halved")
      .at_least(1);
  section.key("consecutive_hysteresis", consecutive_hysteresis,
              "a finite gradient begins the count of scale_hysteresis anew, "
              "not only a growth of the scale");
  section
      .key("min_loss_scale", min_loss_scale,
           "from which the loss scale is not halved: the run ends")
      .at_least(kLeastScale)
      .at_most(kMostScale);
}

void PrecisionConfig::complete() {
  if (loss_scale < 0) loss_scale = compute == "fp16" ? 0 : 1;
}

void PrecisionConfig::check() const {
  TS_CHECK_CONFIG(reduce == "auto" || (reduce == "fp64") == (compute == "fp64"),
                  "precision.reduce is ", reduce, " and precision.compute ",
                  compute, ", whose gradients are kept in ",
                  compute == "fp64" ? "fp64" : "fp32 at most", ". Use auto.");
  TS_CHECK_CONFIG(products == "same" || compute == "bf16",
                  "precision.products is ", products, " and precision.compute ",
                  compute,
                  ", but what is rounded to fp8 is bf16. Use "
                  "precision.compute bf16, or precision.products same.");
  TS_CHECK_CONFIG(loss_scale != 0 || initial_loss_scale >= min_loss_scale,
                  "precision.initial_loss_scale (", initial_loss_scale,
                  ") is below precision.min_loss_scale (", min_loss_scale,
                  "), at which the run ends. Use one that is higher.");
}

at::ScalarType PrecisionConfig::compute_dtype() const {
  if (compute == "fp64") return at::kDouble;
  if (compute == "bf16") return at::kBFloat16;
  if (compute == "fp16") return at::kHalf;
  TORCH_INTERNAL_ASSERT(compute == "fp32", "precision.compute ", compute);
  return at::kFloat;
}

bool PrecisionConfig::is_narrow() const {
  return c10::isReducedFloatingType(compute_dtype()) ||
         c10::isReducedFloatingType(gradient_dtype());
}

at::ScalarType PrecisionConfig::gradient_dtype() const {
  if (reduce == "bf16") return at::kBFloat16;
  if (reduce == "fp16") return at::kHalf;
  return compute == "fp64" ? at::kDouble : at::kFloat;
}

}  // namespace tessera::parallel

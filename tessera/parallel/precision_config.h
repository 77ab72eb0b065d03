// The section precision of the configuration.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "tessera/core/config.h"
#include "tessera/nn/fp8_product.h"

namespace tessera::parallel {

struct PrecisionConfig {
  std::string compute = "fp32";
  std::string products = "same";
  std::string reduce = "auto";  // auto: fp32, or fp64 where that computes
  double loss_scale = -1;       // 0: found while training; -1: see complete()
  double initial_loss_scale = 65536;
  int64_t scale_growth_interval = 2000;
  int64_t scale_hysteresis = 1;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  void declare(config::Section& section);

  // The loss is scaled with fp16, where the user does not say.
  void complete();
  // Whether gradients can be kept, and matrices multiplied, in the types that
  // are asked for.
  void check() const;
  at::ScalarType compute_dtype() const;   // of parameters and activations
  at::ScalarType gradient_dtype() const;  // as they are kept and reduced
  bool is_narrow() const;                 // one of these
  bool is_fp8() const { return products == "fp8"; }  // of linear layers
  nn::ProductType product_type() const {
    return is_fp8() ? nn::ProductType::kFp8 : nn::ProductType::kSame;
  }
};

}  // namespace tessera::parallel

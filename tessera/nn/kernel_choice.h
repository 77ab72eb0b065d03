// Kernels that can be left out by name: to see what one is worth, and that it
// changes nothing but time.
//
// TESSERA_WITHOUT_KERNELS names them, separated by commas; what is computed
// then is what they stand for, by operators of LibTorch.
#pragma once

#include <c10/core/DeviceType.h>

#include <array>

namespace tessera::nn {

enum class Kernel {
  kOneDnnProduct,    // fp32 products by oneDNN, where at::mm is slower
  kWidenedProduct,   // fp16 ones through fp32; bf16, where it is no faster
  kJointProducts,    // layers of one input sum its gradient where it lies
  kGradientInPlace,  // a weight's gradient is added, or written, where it lies
  kSwiGlu,           // silu(gate) * up in one pass, forward and backward
  kGeGlu,            // gelu_tanh(gate) * up likewise
  kGelu,             // GPT-2's activation by one exponential, not by tanh
  kAttention,        // causal attention by flash_attention.h, not by LibTorch
  kBf16Attention,    // its bf16 products by the processor's bf16 arithmetic
  kNormBranch,       // a norm's gradient and the residual's in one pass
  kCrossEntropy,     // the loss and its gradient, row by row
  kHeadByRows,       // logits are there for some rows at a time
  kInputsAgain,      // products do not keep what a norm or activation made
  kExpertRows,       // rows of experts weighed and added up in one pass
  kAdamW,            // optim: clipping, update and rounded copy in one pass
  kGroupedProduct,   // on a GPU all experts' bf16 products in one kernel
  kWaitingRows,  // a weight's gradient of several small micro-batches at once
  kStepGraph,    // engine: a GPU repeats a step that it has recorded
};

// Of each Kernel, in their order.
inline constexpr std::array kKernelNames = {
    "onednn_product", "widened_product", "joint_products", "gradient_in_place",
    "swiglu",         "geglu",           "gelu",           "attention",
    "bf16_attention", "norm_branch",     "cross_entropy",  "head_by_rows",
    "inputs_again",   "expert_rows",     "adamw",          "grouped_product",
    "waiting_rows",   "step_graph"};

// Read once. Errors: TS_CHECK_CONFIG for a name that is none.
bool uses(Kernel kernel);

// Whether products on such a device do not keep what norms and activations
// made (detail/remade.h). A GPU has the memory, and loses 2 to 4% of a step by
// making it again (bench/results/gpu_h100_2026-11-26.md).
inline bool makes_inputs_again(c10::DeviceType device) {
  return device == c10::kCPU && uses(Kernel::kInputsAgain);
}

// Refuses what names no kernel, before ranks start.
inline void check_kernels_chosen() { uses(Kernel::kOneDnnProduct); }

}  // namespace tessera::nn

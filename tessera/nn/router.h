// Which experts a token goes to, and with what weights.
//
//   s = softmax(z) or sigmoid(z), of the gate's products z = x W^T
//   e_1 .. e_k: the largest s_e + b_e, of the `top_groups` groups of experts
//               whose two largest add up to most
//   w_i = scale s_(e_i) / (sum of these k), or not divided
//
// Shapes:   z: (N, E); b: (E), or none; of N tokens.
// Types:    s and what follows in fp32 or wider.
// Noise:    where a gate has it, in training z = x W^T + n softplus(x N^T): n
//           is normal, a pure function of seed, step, layer, sample, position
//           and expert, and so the same on every mesh and when computed again.
// Ties:     as at::topk breaks them in a row: the same on every mesh. Of an
//           expert's tokens, with scores alike but for rounding: the first.
// Choice:   of experts (GateChoice::kExperts): each takes the C tokens of a
//           sample with the largest s_e, C its capacity, and w_e = scale s_e. A
//           token has any number of them, and what an expert takes depends on
//           later tokens: no text can be written so.
// Capacity: where tokens choose an expert takes what comes first in a sample by
//           position, then by choice: no token pushes out an earlier one.
// Comm:     none.
// Source:   Shazeer et al. 2017, arXiv 1701.06538 (noise: eq. 4); Zhou et al.
//           2022, arXiv 2202.09368 (experts choose); of the bias and the groups
//           DeepSeek-AI 2024, arXiv 2412.19437, eqs. 13 to 16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/nn/dropout.h"

namespace tessera::nn {

enum class GateScore { kSoftmax, kSigmoid };
enum class GateChoice { kTokens, kExperts };

struct RouterOptions {
  int64_t experts = 8;
  int64_t top_k = 2;  // of experts that choose, on average
  GateChoice choice = GateChoice::kTokens;
  GateScore score = GateScore::kSoftmax;
  bool normalize = true;  // the weights of a token add up to `scale`
  double scale = 1;
  int64_t groups = 1, top_groups = 1;
};

// Of every token: its probabilities (N, E), which add up to 1, and of its
// experts (N, k) the numbers and the weights. Where experts choose, k is E; the
// numbers are the caller's to know, by taken_tokens(), E where one takes not.
struct Routing {
  at::Tensor probabilities, experts, weights;
};

// `bias` moves choices alone; it may be undefined.
Routing route(const at::Tensor& products, const at::Tensor& bias,
              const RouterOptions& options);

// n of tokens at `positions` of `samples` samples: (B T, E), of a wide type.
at::Tensor gate_noise(const Draw& draw, int64_t layer,
                      const Positions& positions, int64_t samples,
                      int64_t experts, const at::TensorOptions& options);

// The `capacity` largest of each expert: (B, T, E) of bool; scores: (B, T, E).
at::Tensor taken_tokens(const at::Tensor& scores, int64_t capacity);

// Which choices are within the capacity of their experts: (B, T, k) of bool,
// for choices (B, T, k) in the order of positions.
at::Tensor within_capacity(const at::Tensor& choices, int64_t experts,
                           int64_t capacity);

// factor k T / E, rounded down, but for what a product of doubles is short of a
// whole number: the tokens of a sample of T that an expert has room for.
int64_t capacity_of(double factor, int64_t tokens, int64_t top_k,
                    int64_t experts);
// That, and of a short sample one at least: those that are trained on have more
// (parallel/expert), and without any the layer would be none.
int64_t room_of(double factor, int64_t tokens, int64_t top_k, int64_t experts);

}  // namespace tessera::nn

// Dropout by counters: which elements are kept is a pure function of the seed,
// the step, the place in the model, the sample's number in the step and the
// element's place in the sample. It is the same on every mesh, when a unit is
// computed again, and in a resumed run; nothing random is kept, for the
// backward makes the mask again.
//
// Mask:    of a sample and, of attention's weights, a head, a matrix: its rows
//          are tokens, columns are features, or the tokens that are looked at.
//          Column c of row r has word c % 64 / 16 of
//              philox4x32_10({c / 64 * 16 + c % 16, r, head, sample}, key),
//          where tokens count from the sample's begin, heads and samples among
//          all of the model and of the step; head is 0 of what has none.
//          Elements whose word is below rate * 2^32 become 0, the others are
//          divided by 1 - rate.
// Types:   fp64, fp32, bf16 and fp16, which goes through fp32. Elsewhere than
//          on the CPU as detail/drop.h has it, by the same masks.
// Comm:    none.
// Threads: any.
// Source:  Srivastava et al. 2014, JMLR 15 (dropout); Salmon et al., SC 2011
//          (Philox: see core/random.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/random.h"

namespace tessera::nn {

// What all masks of a micro-batch are drawn by.
struct Draw {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t first_sample = 0;  // of the step's samples
};

// One dropout of a model, in a micro-batch.
struct Dropout {
  double rate = 0;  // below 1, where it is used; 0: there is none
  random::PhiloxKey key = {};
  int64_t first_sample = 0;
  int64_t first_head = 0;  // of those that are here
  explicit operator bool() const { return rate > 0; }
};

// That with this name in the model.
Dropout dropout_named(const std::string& name, double rate, const Draw& draw);

// For what autograd keeps until a backward.
c10::IValue as_saved(const Dropout& dropout);
Dropout saved_dropout(const c10::IValue& saved);

// Tokens that are here: runs of positions, as (begin, length).
using Positions = std::vector<std::pair<int64_t, int64_t>>;
// Of these, `length` tokens from number `begin` on; of none, none.
Positions part_of(const Positions& positions, int64_t begin, int64_t length);
// Each position, in their order: (T).
at::Tensor each_of(const Positions& positions,
                   const at::TensorOptions& options);

// What is kept of x (B, T, D), with `past` added to it where that is defined:
// in x's place, unless x is a view. REQUIRES: a dropout.
at::Tensor add_kept(const at::Tensor& past, const at::Tensor& x,
                    const Dropout& dropout, const Positions& positions);

}  // namespace tessera::nn

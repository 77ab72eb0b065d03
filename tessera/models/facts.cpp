#include "tessera/models/facts.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "tessera/mesh/layout.h"
#include "tessera/models/detail/unit_tracer.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::LocalDecoder;
using detail::Memory;
using detail::Operators;
using detail::Ranks;
using detail::Tape;
using detail::Traced;
using detail::UnitTracer;
using mesh::Axis;
using program::UnitFacts;

Ranks along(const mesh::DeviceMesh& mesh, const std::vector<Axis>& axes) {
  Ranks ranks;
  for (Axis axis : axes) {
    if (mesh.degree(axis) == 1) continue;
    ranks.axes.push_back(axis);
    ranks.size *= mesh.degree(axis);
  }
  return ranks;
}

// Who routes which tokens to experts: see parallel/expert.
void set_experts(LocalDecoder& local, const ModelConfig& model,
                 const mesh::DeviceMesh& mesh, const mesh::Coord& coord) {
  const int64_t etp = mesh.degree(Axis::kEtp);
  const bool whole_experts = etp == 1;
  local.experts = model.moe.experts;
  local.top_k = model.moe.top_k;
  local.expert_ffn = mesh::chunk_of(model.ffn, etp, coord[Axis::kEtp]).size();
  local.ep = along(mesh, {Axis::kEp});
  if (local.sequence_parallel && whole_experts) {
    local.samples_of = along(mesh, {Axis::kCp, Axis::kTp});
    return;
  }
  local.samples_of = along(mesh, {Axis::kCp});
  if (local.tp.size == 1) return;
  local.copies = local.tp.size;
  local.shares_tokens = whole_experts;
  local.expert_region = true;
}

LocalDecoder local_decoder(const ModelConfig& model,
                           const mesh::DeviceMesh& mesh,
                           const mesh::Coord& coord,
                           const FactsOptions& options) {
  const Family& family = family_named(model.family);
  const int64_t tp = mesh.degree(Axis::kTp), at = coord[Axis::kTp];
  LocalDecoder local;
  local.family = &family;
  local.samples = options.samples;
  local.tokens = options.seq_len / mesh.degree(Axis::kCp);
  local.width = model.hidden;
  local.heads = model.heads / tp;
  local.kv_heads = std::max<int64_t>(1, model.kv_heads / tp);
  local.head_width = model.head_dim;
  local.ffn = mesh::chunk_of(model.ffn, tp, at).size();
  local.vocab = mesh::chunk_of(model.vocab, tp, at).size();
  local.positions = family.learned_positions ? model.max_seq : 0;
  local.tp = along(mesh, {Axis::kTp});
  local.cp = along(mesh, {Axis::kCp});
  local.tp_coord = at;
  local.cp_coord = coord[Axis::kCp];
  local.sequence_parallel = options.sequence_parallel && tp > 1;
  local.context_method = options.context_method;
  if (model.moe.experts > 0) set_experts(local, model, mesh, coord);
  return local;
}

// Goes through units and notes what they cost.
class Meter {
 public:
  Meter(const LocalDecoder& local, const FactsOptions& options)
      : local_(local),
        options_(options),
        element_(static_cast<int64_t>(c10::elementSize(options.compute))),
        wide_(options.compute == at::kDouble ? 8 : 4) {}

  using Unit = std::function<Traced(UnitTracer&, const Traced&)>;
  // A unit with so many elements of input, whose gradient is asked for.
  UnitFacts measure(int64_t input_numel, const Unit& unit) const {
    UnitFacts facts;
    facts.plain_forward_peak_bytes = plain_peak(input_numel, unit);
    Tape tape(/*records=*/true);
    if (options_.gradient != options_.compute) tape.set_mixed_bytes(4);
    const Operators ops(tape, element_, wide_, options_.threads);
    UnitTracer tracer(ops, local_);
    const Traced input = input_of(tape, input_numel);
    facts.input_bytes = tape.now();
    const Traced output = unit(tracer, input);
    facts.output_bytes = output.numel * element_;
    facts.kept_bytes = tape.now() - facts.input_bytes - facts.output_bytes;
    facts.forward_peak_bytes = tape.peak() - facts.input_bytes;
    facts.forward = tape.forward;

    std::vector<Traced> roots = {output};
    std::vector<Memory> gradients = {tape.allocate(facts.output_bytes)};
    if (tracer.balance().node != nullptr) {
      roots.push_back(tracer.balance());
      gradients.push_back(tape.allocate(wide_));
    }
    tape.reset_peak();
    const int64_t before = tape.now();
    tape.backward(roots, gradients);
    facts.backward_peak_bytes = tape.peak() - before;
    facts.backward_input = tape.backward_input;
    facts.backward_weight = tape.backward_weight;
    facts.forward_collectives = tape.forward_collectives;
    facts.backward_collectives = tape.backward_collectives;
    return facts;
  }

  UnitFacts loss() const {
    Tape tape(/*records=*/true);
    const Operators ops(tape, element_, wide_, options_.threads);
    UnitTracer(ops, local_).loss();
    UnitFacts facts;
    facts.input_bytes = local_.logits_numel() * element_;
    facts.forward_peak_bytes = tape.peak();
    facts.plain_forward_peak_bytes = tape.peak();
    facts.forward_collectives = tape.forward_collectives;
    return facts;
  }

 private:
  Traced input_of(Tape& tape, int64_t numel) const {
    return numel == 0 ? Traced{} : tape.leaf(numel, numel * element_);
  }

  int64_t plain_peak(int64_t input_numel, const Unit& unit) const {
    Tape tape(/*records=*/false);
    const Operators ops(tape, element_, wide_, options_.threads);
    UnitTracer tracer(ops, local_);
    const Traced input = input_of(tape, input_numel);
    const int64_t before = tape.now();
    unit(tracer, input);
    return tape.peak() - before;
  }

  const LocalDecoder& local_;
  const FactsOptions& options_;
  const int64_t element_, wide_;
};

// Rotary cosines and sines of the positions that are asked for.
int64_t table_bytes(const LocalDecoder& local, const FactsOptions& options) {
  if (local.positions > 0) return 0;
  const int64_t piece = options.seq_len / (2 * local.cp.size);
  const int64_t positions = local.cp.size == 1
                                ? options.seq_len
                                : (2 * local.cp.size - local.cp_coord) * piece;
  return positions * local.head_width *
         (options.compute == at::kDouble ? 8 : 4);
}

}  // namespace

program::Facts facts_of(const ModelConfig& config, const mesh::DeviceMesh& mesh,
                        const mesh::Coord& coord, const FactsOptions& options) {
  ModelConfig model = config;
  model.complete();
  const LocalDecoder local = local_decoder(model, mesh, coord, options);
  const Meter meter(local, options);
  const auto block = [&](bool has_experts) {
    return meter.measure(local.hidden_numel(),
                         [&](UnitTracer& tracer, const Traced& x) {
                           return tracer.block(x, has_experts);
                         });
  };

  program::Facts facts;
  facts.units.resize(2 * model.layers + 2);
  facts.units.front() = meter.measure(
      0, [](UnitTracer& tracer, const Traced&) { return tracer.embed(); });
  // All blocks of a kind are alike.
  const bool any_experts = model.layers_with_experts() > 0;
  const bool any_dense = model.layers_with_experts() < model.layers;
  const UnitFacts dense = any_dense ? block(false) : UnitFacts{};
  const UnitFacts gated = any_experts ? block(true) : UnitFacts{};
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    facts.units[1 + layer] = model.has_experts(layer) ? gated : dense;
  }
  facts.units[model.layers + 1] = meter.measure(
      local.hidden_numel(),
      [](UnitTracer& tracer, const Traced& x) { return tracer.head(x); });
  facts.loss = meter.loss();
  facts.shared_bytes = table_bytes(local, options);
  constexpr int64_t kIdBytes = 8;
  facts.batch_bytes = 2 * local.samples * local.tokens * kIdBytes;
  return facts;
}

}  // namespace tessera::models

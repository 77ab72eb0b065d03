#include "tessera/models/trace/model_facts.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "tessera/models/trace/detail/unit_tracer.h"

namespace tessera::models::trace {
namespace {

using detail::UnitTracer;
using program::UnitFacts;

// Goes through units and notes what they cost.
class Meter {
 public:
  Meter(const TracedModel& model, const FactsOptions& options)
      : model_(model),
        options_(options),
        element_(static_cast<int64_t>(c10::elementSize(options.compute))),
        wide_(options.compute == at::kDouble ? 8 : 4) {}

  using Unit = std::function<Traced(UnitTracer&, const Traced&)>;
  // A unit with so many elements of input, whose gradient is asked for.
  UnitFacts measure(int64_t input_numel, const Unit& unit) const {
    UnitFacts facts = measure(input_numel, unit, /*is_first=*/false);
    facts.plain_forward_peak_bytes = plain_peak(input_numel, unit);
    if (facts.waiting_bytes > 0) {
      const UnitFacts first = measure(input_numel, unit, /*is_first=*/true);
      facts.first_backward_peak_bytes = first.backward_peak_bytes;
      facts.first_weight_part_peak_bytes = first.weight_part_peak_bytes;
    }
    return facts;
  }

  // `is_first`: of a step's micro-batches.
  UnitFacts measure(int64_t input_numel, const Unit& unit,
                    bool is_first) const {
    UnitFacts facts;
    Tape tape = tape_of_a_step(is_first);
    const Operators ops(tape, element_, wide_, options_.threads);
    UnitTracer tracer(ops, model_);
    const Traced input = input_of(tape, input_numel);
    facts.input_bytes = tape.now();
    const Traced output = unit(tracer, input);
    facts.output_bytes = output.numel * element_;
    facts.kept_bytes = tape.now() - facts.input_bytes - facts.output_bytes;
    facts.forward_peak_bytes = tape.peak() - facts.input_bytes;
    facts.forward = tape.forward;
    facts.forward_collectives = tape.forward_collectives;
    facts.products = tape.products;
    facts.again = again_of(tape, tracer);

    const Ends ends = ends_of(tape, tracer, output);
    tape.reset_peak();
    const int64_t before = tape.now();
    tape.backward(ends.roots, ends.gradients);
    facts.backward_peak_bytes = tape.peak() - before;
    facts.backward_input = tape.backward_input;
    facts.backward_weight = tape.backward_weight;
    facts.waiting_bytes = waiting_of(tape.products);
    facts.backward_collectives = tape.backward_collectives;
    if (input_numel > 0) measure_parts(input_numel, unit, is_first, facts);
    return facts;
  }

  // Of a backward in two parts.
  void measure_parts(int64_t input_numel, const Unit& unit, bool is_first,
                     UnitFacts& facts) const {
    Tape tape = tape_of_a_step(is_first);
    const Operators ops(tape, element_, wide_, options_.threads);
    std::optional<UnitTracer> tracer(std::in_place, ops, model_);
    Traced input = input_of(tape, input_numel);
    Traced output = unit(*tracer, input);
    again_of(tape, *tracer);
    Ends ends = ends_of(tape, *tracer, std::exchange(output, {}));
    tracer.reset();
    tape.set_puts_off(true);
    tape.reset_peak();
    const int64_t before = tape.now();
    tape.backward(ends.roots, ends.gradients);
    facts.input_part_peak_bytes = tape.peak() - before;
    ends = {};
    input.memory = nullptr;
    facts.put_off_bytes = tape.now() - facts.input_bytes;  // its gradient
    tape.reset_peak();
    const int64_t between = tape.now();
    tape.run_put_off();
    facts.weight_part_peak_bytes = tape.peak() - between;
  }

  // Behind a unit's forward.
  program::AgainFacts again_of(Tape& tape, const UnitTracer& tracer) const {
    if (!model_.attention_again) {
      return {.flops = tape.forward, .collectives = tape.forward_collectives};
    }
    const program::Flops before = tape.forward;
    const auto calls = static_cast<int64_t>(tape.forward_collectives.size());
    const int64_t kept = tape.now();
    tape.reset_peak();
    tracer.compute_core_again();
    return {.flops = {.matmul = tape.forward.matmul - before.matmul,
                      .attention = tape.forward.attention - before.attention},
            .collectives = {tape.forward_collectives.begin() + calls,
                            tape.forward_collectives.end()},
            .kept_bytes = tape.now() - kept,
            .peak_bytes = tape.peak() - kept};
  }

  UnitFacts loss() const {
    Tape plain = tape_of(/*records=*/false);
    Tape tape = tape_of_a_step(/*is_first=*/false);
    Tape first = tape_of_a_step(/*is_first=*/true);
    for (Tape* each : {&plain, &tape, &first}) {
      const Operators ops(*each, element_, wide_, options_.threads);
      UnitTracer(ops, model_).loss();
    }
    UnitFacts facts;
    facts.input_bytes = model_.head_numel() * element_;
    facts.forward_peak_bytes = tape.peak();
    facts.plain_forward_peak_bytes = plain.peak();
    facts.first_backward_peak_bytes = first.peak();
    facts.forward = tape.forward;
    facts.backward_input = tape.backward_input;
    facts.backward_weight = tape.backward_weight;
    facts.products = tape.products;
    // One weight, whichever depth's rows.
    facts.waiting_bytes = waiting_of({tape.products.front()});
    facts.forward_collectives = tape.forward_collectives;
    return facts;
  }

 private:
  // What a unit's backward begins with: its output, and an auxiliary loss.
  struct Ends {
    std::vector<Traced> roots;
    std::vector<Memory> gradients;
  };
  Ends ends_of(Tape& tape, const UnitTracer& tracer,
               const Traced& output) const {
    Ends ends{{output}, {tape.allocate(output.numel * element_)}};
    if (tracer.balance().node != nullptr) {
      ends.roots.push_back(tracer.balance());
      ends.gradients.push_back(tape.allocate(wide_));
    }
    return ends;
  }

  // dy and x of each weight whose rows wait.
  int64_t waiting_of(
      const std::vector<program::MatrixProduct>& products) const {
    int64_t numbers = 0;
    for (const auto& each : products) {
      if (each.together == 1) continue;
      numbers += each.together * each.rows * (each.in + each.out);
    }
    return numbers * element_;
  }

  Tape tape_of_a_step(bool is_first) const {
    Tape tape = tape_of(/*records=*/true);
    if (is_first) tape.set_first();
    tape.set_frozen(model_.config.lora.rank > 0);
    return tape;
  }

  Tape tape_of(bool records) const {
    Tape tape(records);
    tape.set_types(options_.compute, options_.gradient);
    tape.set_device(options_.device);
    tape.set_batches(options_.batches);
    return tape;
  }

  Traced input_of(Tape& tape, int64_t numel) const {
    return numel == 0 ? Traced{} : tape.leaf(numel, numel * element_);
  }

  int64_t plain_peak(int64_t input_numel, const Unit& unit) const {
    Tape tape = tape_of(/*records=*/false);
    const Operators ops(tape, element_, wide_, options_.threads);
    UnitTracer tracer(ops, model_);
    const Traced input = input_of(tape, input_numel);
    const int64_t before = tape.now();
    unit(tracer, input);
    return tape.peak() - before;
  }

  const TracedModel& model_;
  const FactsOptions& options_;
  const int64_t element_, wide_;
};

// Rotary cosines and sines of the positions that are asked for.
int64_t table_bytes(const TracedModel& model, const FactsOptions& options) {
  if (family_named(model.config.family).learned_positions) return 0;
  const ModelConfig& config = model.config;
  std::set<bool> tables;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    tables.insert(config.turns_locally(layer));
  }
  const auto pieces = static_cast<int64_t>(model.pieces.size());
  const int64_t positions =
      (std::ranges::max(model.pieces) + 1) * (model.tokens / pieces);
  return static_cast<int64_t>(tables.size()) * positions * config.rotary_dim() *
         (options.compute == at::kDouble ? 8 : 4);
}

}  // namespace

program::Facts facts_of(const TracedModel& model, const FactsOptions& options) {
  const ModelConfig& config = model.config;
  const Meter meter(model, options);
  const auto block = [&](int64_t layer) {
    return meter.measure(model.hidden_numel(),
                         [&](UnitTracer& tracer, const Traced& x) {
                           return tracer.block(x, layer);
                         });
  };

  program::Facts facts;
  const int64_t blocks = config.num_blocks();
  facts.units.resize(2 * blocks + 2);
  facts.units.front() = meter.measure(
      0, [](UnitTracer& tracer, const Traced&) { return tracer.embed(); });
  // All blocks of a kind are alike: with experts or dense, of one window.
  std::map<std::pair<bool, int64_t>, UnitFacts> kinds;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::pair kind(config.has_experts(layer), config.window_of(layer));
    if (!kinds.contains(kind)) kinds[kind] = block(layer);
    facts.units[1 + layer] = kinds[kind];
  }
  for (int64_t depth = 1; depth <= model.depths; ++depth) {
    facts.units[config.layers + depth] =
        meter.measure(depth * model.hidden_numel(),
                      [depth](UnitTracer& tracer, const Traced& x) {
                        return tracer.predict_ahead(x, depth);
                      });
  }
  facts.units[blocks + 1] =
      meter.measure((1 + model.depths) * model.hidden_numel(),
                    [](UnitTracer& tracer, const Traced& x) {
                      return tracer.before_head(x);
                    });
  facts.loss = meter.loss();
  facts.batches = options.batches;
  facts.shared_bytes = table_bytes(model, options);
  constexpr int64_t kIdBytes = 8;
  const int64_t ids_bytes = model.samples * model.tokens * kIdBytes;
  facts.batch_bytes = 2 * (1 + model.depths) * ids_bytes;
  if (model.tokens < model.whole_tokens) {  // ids ahead, then targets
    facts.whole_batch_bytes =
        (2 + model.depths) * model.samples * model.whole_tokens * kIdBytes;
  }
  if (model.documents) {
    facts.batch_bytes += model.samples * model.whole_tokens * kIdBytes;
  }
  return facts;
}

}  // namespace tessera::models::trace

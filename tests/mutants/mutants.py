#!/usr/bin/env python3
"""Faults for a test build: what they change, and what `verify` must say of them.

mutants.py --sources ROOT --into FOLDER writes the sources with all their faults
behind switches: MUTANT(name) is true where the environment variable
TESSERA_MUTANT is that name. tests/parity/test_mutants.py switches them on, one
after the other. A fault whose text is not in its source exactly once ends the
build: the list keeps step with the code.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

LLAMA = {"family": "llama", "layers": 2, "hidden": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 14,
         "vocab": 37, "max_seq": 16, "tie_embeddings": False}
ONE_KV_HEAD = {**LLAMA, "kv_heads": 1}
TIED = {**LLAMA, "tie_embeddings": True}
GPT2 = {"family": "gpt2", "layers": 2, "hidden": 16, "heads": 4, "ffn": 14, "vocab": 37, "max_seq": 16}
DROPPED = {**LLAMA, "dropout": 0.2}
MIXTRAL = {**LLAMA, "family": "mixtral", "moe": {"experts": 4, "top_k": 2, "aux_loss": 0.1}}
GATED = {**LLAMA, "family": "mixtral", "moe": {"experts": 4, "top_k": 2, "aux_loss": 0.1, "z_loss": 0.5,
                                               "shared_experts": 1, "bias_balance": True}}
# Half of all choices are dropped.
FULL = {**MIXTRAL, "moe": {**MIXTRAL["moe"], "capacity_factor": 0.5}}
NOISY = {**MIXTRAL, "moe": {**MIXTRAL["moe"], "noise": True}}
BALANCED = {**MIXTRAL, "moe": {**MIXTRAL["moe"], "aux_loss": 1.0, "balance": "batch"}}
CHOOSING = {**MIXTRAL, "moe": {**MIXTRAL["moe"], "choice": "experts", "capacity_factor": 1.0}}
DEEPSEEK = {**LLAMA, "family": "deepseek_v3", "kv_heads": 4, "head_dim": 6, "latent": {"q_rank": 6, "kv_rank": 6},
            "moe": {"experts": 4, "top_k": 2}}
AHEAD = {**DEEPSEEK, "mtp": {"layers": 2}}
WINDOW = {**LLAMA, "family": "mistral", "window": 5}
# Turned by 100 in the first layer, which has the window.
GEMMA3 = {**LLAMA, "family": "gemma3_text", "tie_embeddings": True, "query_pre_attn_scalar": 9, "window": 5,
          "window_every": 2, "rope_theta_local": 100.0}


class Mutant(NamedTuple):
    name: str
    source: str
    right: str  # in the source, once
    wrong: str  # in its place; MUTANT stands for the switch
    config: dict  # in which it shows
    says: str  # a pattern of one of the first three lines that verify prints
    with_passes: str = ""  # TESSERA_WITH_PASSES


def mesh(model=None, **sections):
    """A configuration of the model on a mesh, which is `mesh=` of the sections."""
    return {"model": model or LLAMA, "data": {"seq_len": 16}, "batch": {"global": 8, "micro": 1},
            "optimizer": {"lr": 0.01}, "schedule": {"warmup": 0}, "run": {"steps": 10}, **sections}


LAYOUTS = "tessera/parallel/data/sharded_parameters.cpp"
PARAMETERS = "tessera/parallel/data/parameter_storage.cpp"
GRADIENTS = "tessera/parallel/data/gradient_storage.cpp"
ACTOR = "tessera/engine/model_actor.cpp"
OPTIMIZER = "tessera/optim/optimizer.cpp"
DELAYED = {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw"}}
MUON = {"type": "muon", "lr": 0.01}
RANK = "tessera/engine/rank_actor.cpp"
QUEUE = "tessera/nn/weight_queue.cpp"
TENSOR = "tessera/parallel/tensor/tensor_parallel.cpp"
MOE = "tessera/nn/moe.cpp"
LATENT = "tessera/nn/latent_attention.cpp"
PIECES = "tessera/nn/piece_attention.cpp"
PASSES = "tessera/program/passes/"

MUTANTS = [
    Mutant("reduction_dropped", GRADIENTS,
           "    if (peers_.size() == 1) return;\n",
           "    if (peers_.size() == 1 || MUTANT) return;\n",
           mesh(mesh={"dp_replicate": 2}),
           r"^\S+weight: gradient .* over dp_replicate"),
    Mutant("reduction_doubled", GRADIENTS,
           "    whole_.begin_all_reduce(peers_, mode, bucket_bytes_);\n",
           "    if (MUTANT) peers_.all_reduce(whole_.flat(), comm::ReduceOp::kSum, comm::Mode::kBlocking);\n"
           "    whole_.begin_all_reduce(peers_, mode, bucket_bytes_);\n",
           mesh(mesh={"dp_replicate": 2}),
           r"^\S+weight: gradient 2.000 times too large: summed twice over dp_replicate"),
    Mutant("reduction_on_the_wrong_axis", LAYOUTS,
           "  layout = layout.with(layout.replica_axis(), Placement::replicate_summed());\n",
           "  if (MUTANT && !layout.on(mesh::Axis::kTp).is_shard()) {\n"
           "    layout = layout.with(mesh::Axis::kTp, Placement::replicate_summed());\n"
           "    return;\n"
           "  }\n"
           "  layout = layout.with(layout.replica_axis(), Placement::replicate_summed());\n",
           mesh(mesh={"dp_replicate": 2, "tp": 2}),
           r"^(blocks\.\d\.|final_)\w*norm\.weight: gradient .* over dp_replicate"),
    Mutant("reduced_micro_batch_lost", GRADIENTS,
           "      sum_.add_(reduced_);\n",
           "      MUTANT ? sum_.copy_(reduced_) : sum_.add_(reduced_);\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 2}),
           r"^\S+weight: gradient .* over .*zero or accumulation"),
    Mutant("replicas_of_shards_not_summed", GRADIENTS,
           "    if (!bundle_.is_summed()) return;\n"
           "    work_ = peers_.all_reduce(stays() ? reduced_ : sum_, comm::ReduceOp::kSum,\n",
           "    if (!bundle_.is_summed()) return;\n"
           "    if (MUTANT && !stays()) return;\n"
           "    work_ = peers_.all_reduce(stays() ? reduced_ : sum_, comm::ReduceOp::kSum,\n",
           mesh(mesh={"dp_replicate": 2, "dp_shard": 2}, zero={"stage": 3}),
           r"^\S+weight: gradient .* over dp_replicate"),
    Mutant("replicas_of_experts_not_summed", LAYOUTS,
           "  layout = layout.with(layout.data_axis(), own);\n",
           "  layout = layout.with(layout.data_axis(), own);\n"
           "  if (MUTANT && layout.is_of_expert()) return;\n",
           mesh(MIXTRAL, mesh={"dp_replicate": 2, "dp_shard": 2}, zero={"stage": 3, "expert_shard": "dp_shard"}),
           r"^\S+experts\S+weight: gradient .* over dp_replicate .*expert_shard"),
    Mutant("shards_of_experts_from_other_replicas", "tessera/parallel/data/bundle.cpp",
           "    bundle.shards = mesh.peers(rank, {bundle.axis});\n",
           "    const auto beside = mesh::Axis::kExpertReplicate;\n"
           "    const bool is_lost = MUTANT && bundle.axis == mesh::Axis::kExpertDp && mesh.degree(beside) > 1;\n"
           "    bundle.shards = mesh.peers(rank, {is_lost ? beside : bundle.axis});\n",
           mesh(MIXTRAL, mesh={"dp_replicate": 2, "dp_shard": 2}, zero={"stage": 3, "expert_shard": "dp_shard"}),
           r"^\S+experts\S+weight: .* over dp_replicate"),
    Mutant("gather_is_stale", PARAMETERS,
           "  work_.wait();\n",
           "  work_.wait();\n"
           "  static thread_local std::set<const void*> gathered;\n"
           "  if (!gathered.insert(this).second && MUTANT && bundle_.stage < 3) return;\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 1}),
           r"^\S+weight: the layers see another value .* stale, over dp_shard"),
    Mutant("scale_off_by_an_axis", ACTOR,
           "  return scale_ / target_tokens_of(microbatch, /*depth=*/0);\n",
           "  return scale_ * (MUTANT ? composed_.mesh.degree(mesh::Axis::kCp) : 1) /\n"
           "         target_tokens_of(microbatch, /*depth=*/0);\n",
           mesh(mesh={"cp": 2}),
           r"^\S+weight: gradient 2.000 times too large: summed twice over cp"),
    Mutant("expert_gradients_divided_by_ep", ACTOR,
           "  std::vector<at::Tensor> owned;\n",
           "  std::vector<at::Tensor> owned;\n"
           "  for (const auto& each : composed_.parameters->parameters()) {\n"
           "    if (!MUTANT || !each.layout.is_of_expert()) continue;\n"
           "    at::Tensor gradient = each.gradient;\n"
           "    gradient.div_(composed_.mesh.degree(mesh::Axis::kEp));\n"
           "  }\n",
           mesh(MIXTRAL, mesh={"dp_replicate": 4, "ep": 2}),
           r"^\S+experts\S+weight: gradient 2.000 times too small: divided, or not summed, over .*ep"),
    Mutant("shared_batch_is_stale", "tessera/engine/batch_share.cpp",
           "void BatchShare::turn() { held_ = std::exchange(coming_, std::nullopt); }\n",
           "void BatchShare::turn() {\n"
           "  auto come = std::exchange(coming_, std::nullopt);\n"
           "  if (!held_ || !MUTANT) held_ = std::move(come);\n"
           "}\n",
           mesh(mesh={"pp": 2, "tp": 2}, data={"seq_len": 16, "reader": "first"}),
           r"^.* over reader\?"),
    Mutant("norm_counts_replicas", ACTOR,
           "    if (parameter.layout.owned_by(composed_.coord)) {\n",
           "    if (parameter.layout.owned_by(composed_.coord) || MUTANT) {\n",
           mesh(mesh={"dp_replicate": 2}),
           r"^grad_norm 1.414 times too large: .*over dp_replicate"),
    Mutant("norm_of_one_rank", ACTOR,
           "      norm_work_ = world_.all_reduce(squares_, comm::ReduceOp::kSum, mode);\n",
           "      if (!MUTANT) norm_work_ = world_.all_reduce(squares_, comm::ReduceOp::kSum, mode);\n",
           mesh(mesh={"pp": 2}),
           r"^grad_norm .* over pp"),
    Mutant("tags_swapped", "tessera/engine/wire.cpp",
           "          .tag = receiver * 2 + (ends.activations ? 1 : 0)};\n",
           "          .tag = (MUTANT && ends.sends && ends.activations\n"
           "                      ? receiver + (message.microbatch % 2 == 0 ? 1 : -1) * chunks * stages\n"
           "                      : receiver) * 2 + (ends.activations ? 1 : 0)};\n",
           mesh(mesh={"pp": 2}, pipeline={"schedule": "gpipe"}),
           r"^\S+weight: gradient .* over pp"),
    Mutant("last_micro_batch_alone", RANK,
           "  const Start start = start_backward(microbatch, unit);\n",
           "  const bool first = unit == model_.num_units() - 1;\n"
           "  if (first && MUTANT) composed_.parameters->zero_gradients();\n"
           "  const Start start = start_backward(microbatch, unit);\n",
           mesh(mesh={"dp_replicate": 2}),
           r"^\S+weight: gradient .* over accumulation"),
    Mutant("recomputed_from_another_input", RANK,
           "  here.output = model_.forward_unit(\n"
           "      unit, here.input, tokens_of(microbatch), keeps ? &here.balance : nullptr,\n",
           "  at::Tensor x = here.input;\n"
           "  const bool again = keeps && composed_.units.all[unit].recomputed_from;\n"
           "  if (MUTANT && again) x = x.roll(1, /*dims=*/1);\n"
           "  here.output = model_.forward_unit(\n"
           "      unit, x, tokens_of(microbatch), keeps ? &here.balance : nullptr,\n",
           mesh(mesh={"tp": 2}, recompute={"mode": "block"}),
           r"^\S+weight: gradient .* over recompute"),
    Mutant("replayed_otherwise", RANK,
           "  run(microbatch, unit, /*keeps=*/false);\n",
           "  run(microbatch, unit, /*keeps=*/false);\n"
           "  if (MUTANT) microbatches_.at(microbatch).units.at(unit).output.mul_(1.5);\n",
           mesh(mesh={"pp": 2}, recompute={"mode": "minimal"}),
           r"^\S+weight: gradient .* over recompute"),
    Mutant("recomputed_stage_hands_on_another_output", RANK,
           "  run(microbatch, unit, /*keeps=*/true);\n",
           "  run(microbatch, unit, /*keeps=*/true);\n"
           "  const bool is_first = composed_.units.all[unit].recomputed_from == unit;\n"
           "  Passed& again = microbatches_.at(microbatch).units.at(unit);\n"
           "  if (MUTANT && !is_first) again.output = again.output * 1.5;\n",
           mesh(mesh={"pp": 2}, recompute={"mode": "stage"}),
           r"^\S+weight: gradient .* over recompute"),
    Mutant("attention_recomputed_from_another_q", "tessera/nn/core_again.cpp",
           "    state->y = state->core(state->q, state->k, state->v);\n",
           "    state->y = state->core(MUTANT ? state->q.roll(1, 1) : state->q, state->k, state->v);\n",
           mesh(mesh={"tp": 2}, recompute={"mode": "selective"}),
           r"^\S+attention\S+weight: gradient .* over recompute"),
    Mutant("gradient_normalised_here_alone", ACTOR,
           "  gradient_scale_ = rules_.scaling.of(settled_.grad_norm) / scale_;\n",
           "  const double part = settled_.grad_norm / std::sqrt(static_cast<double>(world_.size()));\n"
           "  gradient_scale_ = rules_.scaling.of(MUTANT ? part : settled_.grad_norm) / scale_;\n",
           mesh(mesh={"dp_replicate": 2}, optimizer={"type": "sgd", "lr": 0.01, "normalize_grad": True}),
           r"^\S+weight: "),
    Mutant("loss_scale_grows_on_one_stage", ACTOR,
           "  if (!input_.again) loss_scale_.update(is_finite);\n",
           "  const bool hears = !MUTANT || composed_.coord[mesh::Axis::kPp] == 0;\n"
           "  if (!input_.again && hears) loss_scale_.update(is_finite);\n",
           mesh(mesh={"pp": 2}, precision={"loss_scale": 0, "scale_growth_interval": 1}),
           r"^(grad_norm|\S+weight: gradient) .* over pp"),
    Mutant("bias_on_every_rank", "tessera/nn/blocks.cpp",
           "  const at::Tensor y = reduce_(product(x, {}));\n"
           "  return bias_.defined() ? y + bias_ : y;\n",
           "  if (MUTANT) return reduce_(product(x, bias_));\n"
           "  const at::Tensor y = reduce_(product(x, {}));\n"
           "  return bias_.defined() ? y + bias_ : y;\n",
           mesh(GPT2, mesh={"tp": 2}),
           r"^blocks\.\*\.(attention\.o|mlp\.down)\.bias: once it is not .* over tp"),
    Mutant("kv_heads_not_summed", TENSOR,
           "      return Placement::shard(0, std::max<int64_t>(1, tp / heads));\n",
           "      Placement cut = Placement::shard(0, std::max<int64_t>(1, tp / heads));\n"
           "      if (MUTANT) cut.summed = false;\n"
           "      return cut;\n",
           mesh(ONE_KV_HEAD, mesh={"tp": 2}),
           r"^blocks\.\d\.attention\.[kv]\.weight: gradient .* over tp"),
    Mutant("norms_not_summed_over_the_sequence", TENSOR,
           "      return sequence ? Placement::replicate_summed() : Placement::replicate();\n",
           "      return sequence && !MUTANT ? Placement::replicate_summed() : Placement::replicate();\n",
           mesh(mesh={"tp": 2}, tensor={"sequence_parallel": True}),
           r"^(blocks\.\d\.|final_)\w*norm\.weight: gradient .* over tp or sequence_parallel"),
    Mutant("vocabulary_not_summed", "tessera/parallel/tensor/vocabulary_loss.cpp",
           "  group.all_reduce(parts, comm::ReduceOp::kSum, comm::Mode::kBlocking);\n",
           "  if (!MUTANT) group.all_reduce(parts, comm::ReduceOp::kSum, comm::Mode::kBlocking);\n",
           mesh(mesh={"tp": 2}),
           r"^\S+weight: gradient .* over tp"),
    Mutant("tied_embedding_not_summed", "tessera/mesh/layout.cpp",
           "  return mesh.ranks_at(mine, along);\n",
           "  if (MUTANT) along.front().coords = {mine[Axis::kPp]};\n"
           "  return mesh.ranks_at(mine, along);\n",
           mesh(TIED, mesh={"pp": 2}),
           r"^embed\.tokens\.weight: gradient .* over pp"),
    Mutant("mask_lost_in_the_ring", PIECES,
           "        if (k_pieces_[j] > q_pieces_[i]) continue;\n",
           "        if (k_pieces_[j] > q_pieces_[i] && !MUTANT) continue;\n",
           mesh(mesh={"cp": 2}),
           r"^\S+attention\S+weight: gradient .* over cp"),
    Mutant("documents_forgotten_behind_the_first_stage", "tessera/engine/rank_actor.cpp",
           "          mine.batch.document_starts,\n          draw_of(",
           "          MUTANT && composed_.coord[mesh::Axis::kPp] > 0 ? at::Tensor() : mine.batch.document_starts,\n"
           "          draw_of(",
           mesh(mesh={"pp": 2}, data={"seq_len": 16, "intra_document_masking": True}),
           r"^\S+attention\S+weight: gradient .* over pp"),
    Mutant("positions_not_those_of_the_pieces", "tessera/models/model.cpp",
           "    runs.emplace_back(begin + piece * length, length);\n",
           "    const auto here = static_cast<int64_t>(runs.size());\n"
           "    runs.emplace_back(begin + (MUTANT ? here : piece) * length, length);\n",
           mesh(mesh={"cp": 2}),
           r"^\S+attention\S+weight: gradient .* over cp"),
    Mutant("base_of_windows_not_that_of_pieces", "tessera/models/decoder.cpp",
           "    const nn::Rotation part = table.rows(first, length, like);\n",
           "    const nn::Rotation part = (MUTANT ? rotary_ : table).rows(first, length, like);\n",
           mesh(GEMMA3, mesh={"cp": 2}),
           r"^\S+attention\S+weight: gradient .* over cp"),
    Mutant("scores_not_scaled_where_they_are_computed_again", "tessera/nn/attention.cpp",
           "  if (heads_.q_scale != 1) q = q * heads_.q_scale;\n",
           "  if (heads_.q_scale != 1 && !(MUTANT && again)) q = q * heads_.q_scale;\n",
           mesh(GEMMA3, mesh={"tp": 2}, recompute={"mode": "selective"}),
           r"^\S+weight: gradient .* over recompute"),
    Mutant("dropout_of_local_positions", PIECES,
           "  FlashRuns runs{pair.is_causal, dropout, pair.queries.position,\n",
           "  FlashRuns runs{pair.is_causal, dropout, MUTANT ? pair.queries.begin : pair.queries.position,\n",
           mesh(DROPPED, mesh={"cp": 2}),
           r"^\S+attention\S+weight: gradient .* over cp"),
    Mutant("dropout_of_local_heads", "tessera/nn/attention.cpp",
           "  here.dropout.first_head = first_head_;\n",
           "  here.dropout.first_head = MUTANT ? 0 : first_head_;\n",
           mesh(DROPPED, mesh={"tp": 2}),
           r"^\S+attention\S+weight: gradient .* over tp"),
    Mutant("dropout_of_local_samples", "tessera/engine/rank_model.cpp",
           "    return nn::Draw{seed, step, shares.of(share, microbatch).first};\n",
           "    return nn::Draw{seed, step, shares.of(MUTANT ? 0 : share, microbatch).first};\n",
           mesh(DROPPED, mesh={"dp_replicate": 2}),
           r"^\S+weight: gradient .* over dp_replicate"),
    Mutant("gate_not_summed", "tessera/parallel/expert/expert_parallel.cpp",
           "    layout = layout.with(Axis::kTp, Placement::replicate_summed());\n",
           "    if (!MUTANT) layout = layout.with(Axis::kTp, Placement::replicate_summed());\n",
           mesh(MIXTRAL, mesh={"tp": 2, "ep": 2}),
           r"^blocks\.\d\.moe\.gate\.weight: gradient .* over tp"),
    Mutant("balance_not_counted", ACTOR,
           "  for (size_t i = 0; i < of.balances.size(); ++i) settled_.aux_sum += *next++;\n",
           "  const bool counts = !MUTANT || world_.size() == 1;\n"
           "  for (size_t i = 0; i < of.balances.size() && counts; ++i) settled_.aux_sum += *next++;\n",
           mesh({**MIXTRAL, "moe": {"experts": 4, "aux_loss": 0}}, mesh={"dp_replicate": 2}),
           r"^aux_loss .* over dp_replicate"),
    Mutant("auxiliary_loss_of_every_copy", MOE,
           "add_to(balance.penalty, loss * weight);",
           "add_to(balance.penalty, loss * weight * (MUTANT ? shard_.copies : 1));",
           mesh(MIXTRAL, mesh={"tp": 2, "etp": 2}),
           r"^blocks\.\d\.moe\.gate\.weight: gradient .* over tp"),
    Mutant("gather_not_awaited", PARAMETERS,
           "  work_.wait();\n",
           "  if (!MUTANT) work_.wait();\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 3, "prefetch": 1}),
           r"begin GatherParameters unit \d: all_gather in group dp_shard was let go of and never awaited"),
    Mutant("gather_awaited_where_it_begins", PARAMETERS,
           "  work_ = group_.all_gather(pieces_, sent_, mode);\n",
           "  work_ = group_.all_gather(pieces_, sent_, mode);\n"
           "  if (MUTANT) work_.wait();\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 3, "prefetch": 1}),
           r"all_gather in group dp_shard is awaited by \"begin GatherParameters unit \d\", which does not need it"),
    Mutant("loss_read_by_micro_batch", RANK,
           "  if (trains()) last.gradient = hidden;\n",
           "  if (MUTANT && composed_.data->size() > 1) loss.sum.item();\n"
           "  if (trains()) last.gradient = hidden;\n",
           mesh(mesh={"dp_replicate": 2}),
           r"the host reads 5 times in a step, where 1 are needed"),
    Mutant("norm_read_twice", ACTOR,
           "void ModelActor::clip_gradients() {",
           "void ModelActor::clip_gradients() {\n"
           "  if (MUTANT) squares_.item();\n",
           mesh(mesh={"tp": 2}),
           r"the host reads 2 times in a step, where 1 are needed"),
    Mutant("reduction_read_before_it_is_awaited", GRADIENTS,
           "    std::exchange(work_, {}).wait();\n"
           "    packed_ = at::Tensor();\n",
           "    const at::Tensor early = reduced_.clone();\n"
           "    std::exchange(work_, {}).wait();\n"
           "    if (MUTANT) reduced_ = early;\n"
           "    packed_ = at::Tensor();\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 2}),
           r"^\S+weight: gradient .* over dp_shard or zero or reductions"),
    Mutant("receive_not_awaited", RANK,
           "  found->second.work.wait();\n",
           "  const bool sends = program::is_send(instruction.op);\n"
           "  if (sends || !MUTANT) found->second.work.wait();\n",
           mesh(mesh={"pp": 2}),
           r"begin Receive(Activations|Gradients) \d: recv in group pp was let go of and never awaited"),
    Mutant("gradients_are_received_in_one_tensor", RANK,
           "    sent.tensor = hidden();\n",
           "    static thread_local at::Tensor shared;\n"
           "    if (!shared.defined()) shared = hidden();\n"
           "    sent.tensor = MUTANT && !wire.activations ? shared : hidden();\n",
           mesh(mesh={"pp": 2}),
           r"^\S+weight: gradient .* over pp or messages"),
    Mutant("sent_tensor_is_overwritten", RANK,
           "    if (!last.keeps) last.output = at::Tensor();\n",
           "    if (!last.keeps) last.output = at::Tensor();\n"
           "    if (MUTANT && wire.activations) sent.tensor.zero_();\n",
           mesh(mesh={"pp": 2}),
           r"what begin SendActivations \d: send in group pp reads was changed before it was awaited"),
    Mutant("weights_of_a_unit_left_out", RANK,
           "    std::exchange(here.later, {})->run();\n",
           "    const auto later = std::exchange(here.later, {});\n"
           "    if (!MUTANT || unit != 1) later->run();\n",
           mesh(mesh={"dp_replicate": 2}),
           r"^blocks\.0\.\S+weight: gradient .* over split_backward",
           "split_backward"),
    Mutant("put_off_twice", QUEUE,
           "  products_.push_back(std::move(product));\n",
           "  if (MUTANT) products_.push_back(product);\n"
           "  products_.push_back(std::move(product));\n",
           mesh(mesh={"dp_replicate": 2}),
           r"^\S+weight: gradient .*times too large: .* over split_backward",
           "split_backward"),
    Mutant("weights_before_their_inputs", "tessera/program/schedules/in_turn.cpp",
           "      turns.push_back(part(Op::kBackwardWeight, inputs - late));\n",
           "      const int64_t i = inputs - late + (MUTANT ? 1 : 0);\n"
           "      turns.push_back(part(Op::kBackwardWeight, std::min(i, n - 1)));\n",
           mesh(mesh={"pp": 2}, pipeline={"schedule": "zb_h1"}),
           r"program: at \d+: BackwardWeight \d unit \d: backward: behind its forward"),
    Mutant("handed_over_twice_as_large", RANK,
           "  mine.units.at(before.back()).gradient = std::exchange(first.input, {}).grad();\n",
           "  mine.units.at(before.back()).gradient =\n"
           "      std::exchange(first.input, {}).grad() * (MUTANT ? 2 : 1);\n",
           mesh({**LLAMA, "layers": 4}, mesh={"pp": 2}, pipeline={"schedule": "zb_v"}),
           r"^\S+weight: gradient .* over pp"),
    Mutant("a_share_of_samples_dropped", "tessera/engine/sample_shares.cpp",
           "          : std::accumulate(rows_.begin(), rows_.begin() + share, int64_t{0});\n",
           "          : std::accumulate(rows_.begin(), rows_.begin() + (MUTANT ? 0 : share), int64_t{0});\n",
           mesh(mesh={"dp_replicate": 2, "speeds": [1, 0.5]}, batch={"global": 8, "micro": 2}),
           r"^\S+weight: gradient .* over dp_replicate or speeds"),
    Mutant("loss_weighed_by_even_shares", ACTOR,
           "  target_tokens_ = was_ahead ? next_target_tokens_ : open_batch();\n",
           "  target_tokens_ = was_ahead ? next_target_tokens_ : open_batch();\n"
           "  if (MUTANT && composed_.data->size() > 1) {\n"
           "    target_tokens_ = {input_.samples * input_.tokens * num_microbatches *\n"
           "                      composed_.data->size()};\n"
           "  }\n",
           mesh(mesh={"dp_replicate": 2, "speeds": [1, 0.5]}, batch={"global": 8, "micro": 2}),
           r"^\S+weight: gradient .* over dp_replicate or speeds"),
    Mutant("orthogonalises_the_shard", "tessera/parallel/data/whole_updates.cpp",
           "  if (!gathers(parameter)) return optimizer.piece_as_whole(parameter);\n",
           "  if (!gathers(parameter) || MUTANT) return optimizer.piece_as_whole(parameter);\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 2}, optimizer=MUON),
           r"^blocks\.\d\.\S+weight: .*"),
    Mutant("pieces_put_together_at_the_wrong_place", "tessera/parallel/data/matrix_pieces.cpp",
           "    if (peer == rank) pieces.own = pieces.boxes.back();\n",
           "    if (peer == (MUTANT ? pieces.ranks.front() : rank)) pieces.own = pieces.boxes.back();\n",
           mesh(mesh={"tp": 2}, optimizer=MUON),
           r"^blocks\.\d\.\S+weight: .*"),
    Mutant("updates_not_gathered", PASSES + "sharding.cpp",
           "      if (unit.whole_updates) push(Op::kGatherUpdates, owner, version);\n",
           "      if (unit.whole_updates && !MUTANT) push(Op::kGatherUpdates, owner, version);\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 1}, optimizer=MUON),
           r"program: at \d+: OptimizerStep unit \d: what it is updated by is not gathered yet"),
    Mutant("group_of_the_first_segment", OPTIMIZER,
           "    way_of_.push_back(found - ways_.begin());\n",
           "    way_of_.push_back(MUTANT && segment.parameter.numel() < 100 ? 0 : found - ways_.begin());\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 1},
                optimizer={"lr": 0.01, "groups": [{"match": "blocks.*.mlp.*", "lr": 0.03}]}),
           r"^blocks\.\d\.mlp\.\S+weight: .*"),
    Mutant("average_of_the_shard_left_out", OPTIMIZER,
           "    if (!averages_.empty()) {\n"
           "      averages_[i].lerp_(",
           "    if (!averages_.empty() && !(MUTANT && masters_[i].numel() < 100)) {\n"
           "      averages_[i].lerp_(",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 1}, optimizer={"lr": 0.01, "ema": 0.5}),
           r"^\S+weight: .*average"),
    Mutant("narrow_moments_of_the_shard_not_written_back", OPTIMIZER,
           "  ways_[way].rule->update(configs_[way], group);\n"
           "  put_back(widened);\n",
           "  ways_[way].rule->update(configs_[way], group);\n"
           "  if (MUTANT) std::erase_if(widened, [](const auto& each) { return each.second.numel() < 100; });\n"
           "  put_back(widened);\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 1}, optimizer={"lr": 0.01, "state_dtype": "bf16"}),
           r"^\S+weight: .*"),
    Mutant("narrow_momentum_of_the_piece_not_written_back", OPTIMIZER,
           "  put_back(widened);\n"
           "  return piece",
           "  if (MUTANT) std::erase_if(widened, [](const auto& each) { return each.second.numel() < 100; });\n"
           "  put_back(widened);\n"
           "  return piece",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 2}, optimizer={**MUON, "state_dtype": "bf16"}),
           r"^blocks\.\d\.\S+weight: .*"),
    Mutant("reductions_awaited_behind_the_norm", PASSES + "reductions.cpp",
           "      if (each.op == Op::kNorm || each.op == Op::kSumGradients) {\n",
           "      if (MUTANT && each.op == Op::kNorm) {\n"
           "        lowered_.push_back(each);\n"
           "        flush(whole_);\n"
           "        continue;\n"
           "      }\n"
           "      if (each.op == Op::kNorm || each.op == Op::kSumGradients) {\n",
           mesh(mesh={"dp_replicate": 2}),
           r"program: at \d+: Norm: the reduction of unit \d is not awaited yet"),
    Mutant("reduction_before_the_last_backward", PASSES + "reductions.cpp",
           "        if (!unit.across_stages || !unit.reduced) continue;\n",
           "        if (!unit.across_stages || !unit.reduced) continue;\n"
           "        if (MUTANT && last_add_.contains({-program[i].version, owner})) continue;\n",
           mesh(TIED, mesh={"pp": 2}),
           r"program: at \d+: Backward \d unit \d: the gradients of unit 0 were reduced already"),
    Mutant("prefetch_without_its_barriers", PASSES + "prefetch.cpp",
           "    if (is_barrier(before, unit)) return i;\n",
           "    if (is_barrier(before, unit) && !MUTANT) return i;\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 3, "prefetch": 3}),
           r"program: at \d+: begin GatherParameters unit \d: gathered already"),
    Mutant("freed_and_taken_for_gathered", PASSES + "sharding.cpp",
           "    if (!std::exchange(at(owner, version).gathered, false)) return;\n",
           "    if (!std::exchange(at(owner, version).gathered, MUTANT)) return;\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 3}),
           r"program: at \d+: Loss \d unit \d: the parameters of unit \d are not gathered"),
    Mutant("head_without_room_for_its_gradient", PASSES + "sharding.cpp",
           "                      (trains_ && instruction.op == Op::kLoss);\n",
           "                      (trains_ && instruction.op == Op::kLoss && !MUTANT);\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 2}),
           r"program: at \d+: Loss \d unit \d: the gradients of unit \d are not allocated"),
    Mutant("fetch_left_out", PASSES + "offload.cpp",
           "        if (std::ranges::count(held_, each) == 0) fetch(each, i);\n",
           "        if (std::ranges::count(held_, each) == 0 && !(MUTANT && each.unit == 1)) fetch(each, i);\n",
           mesh(mesh={"dp_shard": 2}, zero={"stage": 2, "offload": "optimizer"}),
           r"program: at \d+: OptimizerStep unit 1: needs FetchStates unit 1, which was not begun"),
    Mutant("release_without_write_back", "tessera/core/file_memory.cpp",
           "             MAP_SHARED | MAP_FIXED, file.fd.get(), file.size);\n",
           "             (MUTANT ? MAP_PRIVATE : MAP_SHARED) | MAP_FIXED, file.fd.get(), file.size);\n",
           mesh(mesh={"dp_replicate": 2}, zero={"offload": "optimizer"}),
           r"^\S+weight: .* over offload"),
    Mutant("backward_at_the_next_version", RANK,
           "  use_parameters(unit);\n  if (part == Op::kBackwardWeight) {\n",
           "  const bool reads_next = MUTANT && composed_.coord[mesh::Axis::kPp] > 0;\n"
           "  if (reads_next) composed_.parameters->use(unit, 1);\n"
           "  if (!reads_next) use_parameters(unit);\n"
           "  if (part == Op::kBackwardWeight) {\n",
           mesh(**DELAYED), r"^\S+weight: gradient .* over pp"),
    Mutant("gather_of_the_oldest", PARAMETERS,
           "  const Slot& from = slot(version);\n",
           "  const Slot& from = slot(MUTANT ? 0 : version);\n",
           mesh(**{**DELAYED, "mesh": {"pp": 2, "dp_shard": 2}, "zero": {"stage": 1}}),
           r"^\S+weight: the layers see another value .* stale, over pp or dp_shard"),
    Mutant("written_over_while_it_is_read", PASSES + "sharding.cpp",
           "      if (keeps) push(Op::kKeepParameters, owner, version);\n",
           "      if (keeps && !MUTANT) push(Op::kKeepParameters, owner, version);\n",
           mesh(**DELAYED),
           r"program: at \d+: OptimizerStep unit \d: what the next batch reads would be written over"),
    Mutant("capacity_of_a_ranks_own_tokens", MOE,
           "  const int64_t of_sample = tokens * (shard_.sample_parts / split.ranks);\n",
           "  const int64_t of_sample = tokens * (MUTANT ? 1 : shard_.sample_parts / split.ranks);\n",
           mesh(FULL, mesh={"cp": 2}), r"^\S+weight: gradient .* over cp"),
    Mutant("choices_in_the_order_of_ranks", MOE,
           "      all.select(0, 0).select(1, n).argsort().narrow(0, 0, here.unpadded);\n",
           "      MUTANT ? at::arange(here.unpadded)\n"
           "             : all.select(0, 0).select(1, n).argsort().narrow(0, 0, here.unpadded);\n",
           mesh(FULL, mesh={"cp": 2}), r"^\S+weight: gradient .* over cp"),
    Mutant("noise_of_each_copy", MOE,
           "      gate_noise(draw, options_.layer, here.positions, here.samples,",
           "      gate_noise({draw.seed + (MUTANT ? shard_.copy : 0), draw.step, draw.first_sample}, options_.layer,\n"
           "                 here.positions, here.samples,",
           mesh(NOISY, mesh={"tp": 2, "etp": 2}), r"^\S+weight: gradient .* over tp"),
    Mutant("batch_of_one_rank", MOE,
           "  if (shard_.sum_batch) shard_.sum_batch(rows);\n",
           "  if (shard_.sum_batch && !MUTANT) shard_.sum_batch(rows);\n",
           mesh(BALANCED, mesh={"dp_replicate": 2}, batch={"global": 8, "micro": 4}),
           r"^\S+weight: gradient .* over dp_replicate"),
    Mutant("experts_choose_of_a_part", MOE,
           "  const at::Tensor numbers =\n",
           "  if (MUTANT) taken.copy_(taken_tokens(scores, capacity(here) / shard_.sample_parts));\n"
           "  const at::Tensor numbers =\n",
           mesh(CHOOSING, mesh={"cp": 2}), r"^\S+weight: gradient .* over cp"),
    Mutant("choices_of_the_first_rank", "tessera/parallel/expert/expert_parallel.cpp",
           "    shard.sample_part = samples->rank();\n",
           "    shard.sample_part = MUTANT ? 0 : samples->rank();\n",
           mesh(FULL, mesh={"cp": 2}), r"^\S+weight: gradient .* over cp"),
    Mutant("load_counted_by_every_copy", MOE,
           "  if (shard_.copy == 0) {",
           "  if (shard_.copy == 0 || MUTANT) {",
           mesh(GATED, mesh={"tp": 2, "etp": 2}),
           r"^blocks\.\d\.moe\.score_bias: gradient 2.000 times too large"),
    Mutant("bias_not_summed_over_copies", MOE,
           "                              Role::router());\n",
           "                              MUTANT ? Role{} : Role::router());\n",
           mesh(GATED, mesh={"tp": 2, "etp": 2}), r"^blocks\.\d\.moe\.score_bias: gradient .* over tp"),
    Mutant("z_loss_of_every_copy", MOE,
           "add_to(balance.penalty, z.square().sum() * (options_.z_loss * share));",
           "add_to(balance.penalty, z.square().sum() * (options_.z_loss * share * (MUTANT ? shard_.copies : 1)));",
           mesh(GATED, mesh={"tp": 2, "etp": 2}), r"^\S+weight: gradient .* over tp"),
    Mutant("shared_experts_not_summed", "tessera/models/decoder.cpp",
           "    if (block->moe() && block->moe()->shared()) {\n",
           "    if (block->moe() && block->moe()->shared() && !MUTANT) {\n",
           mesh(GATED, mesh={"tp": 2}), r"^\S+weight: gradient .* over tp"),
    Mutant("rows_not_put_back", "tessera/parallel/expert/dispatch.cpp",
           "outputs.index_select(0, sent_to(inverse_of(order), came.device()))",
           "outputs.index_select(0, sent_to(MUTANT ? order : inverse_of(order), came.device()))",
           mesh(MIXTRAL, mesh={"dp_replicate": 2, "ep": 2}), r"^\S+weight: gradient .*"),
    Mutant("gradients_of_pieces_not_gathered", "tessera/parallel/expert/expert_parallel.cpp",
           "                return comm::split_with_all_gather(x, kTokenDim, *group);\n",
           "                if (MUTANT) return x.chunk(group->size(), kTokenDim)[group->rank()];\n"
           "                return comm::split_with_all_gather(x, kTokenDim, *group);\n",
           mesh(MIXTRAL, mesh={"tp": 2}), r"^\S+weight: gradient .* over tp"),
    Mutant("chunks_of_the_first_experts", "tessera/parallel/expert/dispatch.cpp",
           "all.begin() + experts.begin);",
           "all.begin() + (MUTANT ? 0 : experts.begin));",
           mesh(MIXTRAL, mesh={"dp_replicate": 2, "ep": 2}, expert={"dispatch_chunks": 2}),
           r"^\S+weight: gradient .*"),
    Mutant("latent_of_queries_not_summed", LATENT,
           '    q_a_ = linear("q_a", options.width, options.q_rank, Role::in_parts());\n',
           '    q_a_ = linear("q_a", options.width, options.q_rank, MUTANT ? Role{} : Role::in_parts());\n',
           mesh(DEEPSEEK, mesh={"tp": 2}), r"^blocks\.\d\.attention\.q_a\.weight: gradient .* over tp"),
    Mutant("norms_of_latents_not_summed", LATENT,
           "                                     Role::in_parts()));\n",
           "                                     MUTANT ? Role{} : Role::in_parts()));\n",
           mesh(DEEPSEEK, mesh={"tp": 2}), r"^blocks\.\d\.attention\.\w+_norm\.weight: gradient .* over tp"),
    Mutant("tokens_ahead_end_with_a_part", RANK,
           "  mine.inputs_ahead = local_ahead(data::inputs_ahead(whole, depths));\n",
           "  mine.inputs_ahead = MUTANT ? data::inputs_ahead(mine.batch, depths)\n"
           "                             : local_ahead(data::inputs_ahead(whole, depths));\n",
           mesh(AHEAD, mesh={"cp": 2}), r"^(mtp_loss|\S+weight: gradient) .*"),
    Mutant("targets_ahead_counted_as_the_next", ACTOR,
           "  const double tokens = target_tokens_of(microbatch, depth);\n",
           "  const double tokens = target_tokens_of(microbatch, MUTANT && composed_.mesh.world_size() > 1 ? 0 : depth);\n",
           mesh(AHEAD, mesh={"pp": 2}), r"^(mtp_loss|\S+weight: gradient) .*"),
    Mutant("window_ends_with_a_piece", PIECES,
           "    visit(Pair{queries, keys, is_causal, seen == Within::kPart ? window_ : 0});\n",
           "    const bool forgets = MUTANT && !is_causal;\n"
           "    visit(Pair{queries, keys, is_causal, seen == Within::kPart && !forgets ? window_ : 0});\n",
           mesh(WINDOW, mesh={"cp": 2}), r"^\S+weight: gradient .* over cp"),
    Mutant("window_of_another_piece_is_longer", PIECES,
           "                 pair.keys.position, pair.window};\n",
           "                 pair.keys.position, pair.window + (MUTANT && !pair.is_causal && pair.window > 0 ? 1 : 0)};\n",
           mesh(WINDOW, mesh={"cp": 2}), r"^\S+weight: gradient .* over cp"),
]

SWITCH = '''#include <cstdlib>
#include <set>
#include <string_view>
namespace {
bool is_mutant(std::string_view name) {
  static const char* const chosen = std::getenv("TESSERA_MUTANT");
  return chosen && name == chosen;
}
}  // namespace
'''


def replaced(text, right, wrong, what):
    if text.count(right) != 1:
        sys.exit(f"mutants.py: {what}: its text is in the source {text.count(right)} times, not once")
    return text.replace(right, wrong)


def mutated(root, source):
    text = Path(root, source).read_text()
    for mutant in MUTANTS:
        if mutant.source == source:
            switched = mutant.wrong.replace("MUTANT", f'is_mutant("{mutant.name}")')
            text = replaced(text, mutant.right, switched, mutant.name)
    return SWITCH + text


def sources():
    return sorted({mutant.source for mutant in MUTANTS})


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", required=True, help="the checkout's root")
    parser.add_argument("--into", help="the folder to write to; without it the sources are listed")
    options = parser.parse_args(arguments)
    for source in sources():
        if options.into is None:
            print(source)
            continue
        path = Path(options.into, Path(source).name)
        text = mutated(options.sources, source)
        if not path.exists() or path.read_text() != text:  # an equal one is not compiled again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])

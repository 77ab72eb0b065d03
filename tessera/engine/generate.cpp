#include "tessera/engine/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "tessera/comm/agree.h"
#include "tessera/core/device.h"
#include "tessera/core/error.h"
#include "tessera/mesh/layout.h"

namespace tessera::engine {

using mesh::Axis;

namespace {

class Generation {
 public:
  Generation(RankModel& model, comm::Communicator& ranks, int64_t capacity)
      : model_(model),
        world_(ranks.world()),
        pipeline_(*model.composed().pipeline),
        tp_(*ranks.make_group(model.mesh().peers(ranks.rank(), {Axis::kTp}),
                              "tp")),
        cache_(model.decoder().make_cache(capacity)) {
    // Of those that have the logits, all the same, the first one draws.
    mesh::Coord last = model.mesh().coord_of(0);
    last[Axis::kPp] = pipeline_.size() - 1;
    drawer_ = model.mesh().rank_at(last);
  }

  int64_t next(const std::vector<int64_t>& ids, const models::Draw& draw) {
    const at::Tensor logits = forward(at::tensor(ids, at::kLong).unsqueeze(0));
    at::Tensor token = at::full({1}, kNone, at::kLong);
    std::string why_none;  // the others wait to hear of it
    if (world_.rank() == drawer_) {
      why_none = comm::complaint_of([&] { token.fill_(draw(logits)); });
    }
    if (world_.size() > 1) world_.broadcast(token, drawer_).synchronize();
    const auto drawn = token.item<int64_t>();
    TS_CHECK(drawn != kNone, comm::first_complaint(world_, why_none));
    return drawn;
  }

 private:
  static constexpr int64_t kNone = -1;  // a token

  // This stage's units; logits (V) on the last one.
  at::Tensor forward(const at::Tensor& ids) {
    const at::NoGradGuard no_grad;
    const int64_t stage = pipeline_.rank(), tokens = ids.size(1);
    const auto& composed = model_.composed();
    at::Tensor x;
    if (stage == 0) {
      x = sent_to(ids, composed.activations.device());
    } else {
      x = at::empty({1, tokens, model_.decoder().config().hidden},
                    composed.activations);
      pipeline_.recv(x, stage - 1).wait();
    }
    for (int64_t unit : composed.units.chunks.front()) {
      x = model_.decoder().forward_unit_cached(unit, x, begin_, cache_);
    }
    begin_ += tokens;
    if (stage + 1 == pipeline_.size()) return whole(x[0]);
    pipeline_.send(x.contiguous(), stage + 1).wait();
    return {};
  }

  // Of all entries of the vocabulary, where a rank of tp has some.
  at::Tensor whole(const at::Tensor& logits) {
    if (tp_.size() == 1) return logits;
    const int64_t entries = model_.decoder().config().vocab;
    const auto share = [&](int64_t rank) {
      return mesh::chunk_of(entries, tp_.size(), rank).size();
    };
    const int64_t most = share(0);
    const at::Tensor mine = at::zeros({most}, logits.options());
    mine.narrow(0, 0, logits.size(0)).copy_(logits);
    at::Tensor all = at::empty({tp_.size(), most}, logits.options());
    tp_.all_gather(all, mine).wait();
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < tp_.size(); ++rank) {
      parts.push_back(all[rank].narrow(0, 0, share(rank)));
    }
    return at::cat(parts);
  }

  RankModel& model_;
  comm::Group& world_;
  comm::Group& pipeline_;
  comm::Group& tp_;
  models::Cache cache_;
  int64_t begin_ = 0;  // tokens that were seen
  int64_t drawer_ = 0;
};

class Evaluations {
 public:
  Evaluations(RankModel& model, comm::Group& world, int64_t longest)
      : model_(model), world_(world), longest_(longest) {}

  int64_t next(const std::vector<int64_t>& ids, const models::Draw& draw) {
    text_.insert(text_.end(), ids.begin(), ids.end());
    // All draw, so that what cannot be drawn from ends all alike; the first one
    // is believed, whose processor may round otherwise.
    const at::Tensor token = at::tensor({draw(logits())}, at::kLong);
    if (world_.size() > 1) world_.broadcast(token, 0).synchronize();
    return token.item<int64_t>();
  }

 private:
  // (V) of what follows the text, on every rank.
  at::Tensor logits() {
    const auto count = static_cast<int64_t>(text_.size());
    const at::Tensor ids = at::zeros({1, length_for(count)}, at::kLong);
    ids[0].narrow(0, 0, count).copy_(at::tensor(text_, at::kLong));
    const int64_t vocab = model_.decoder().config().vocab;
    const at::Tensor all = at::zeros({vocab}, at::kDouble);
    model_.evaluate({ids, ids}, nullptr, [&](const at::Tensor& here) {
      const at::Tensor row = row_of(here, ids.size(1), count - 1);
      if (!row.defined()) return;
      const auto share = mesh::chunk_of(vocab, model_.mesh().degree(Axis::kTp),
                                        place(Axis::kTp));
      all.slice(0, share.begin, share.end).copy_(row);
    });
    if (world_.size() > 1) world_.all_reduce(all).synchronize();
    return all;
  }

  // Tokens behind a text change nothing in it. cp and sequence parallelism cut
  // evenly what they get.
  int64_t length_for(int64_t count) const {
    const auto& mesh = model_.mesh();
    const int64_t cp = mesh.degree(Axis::kCp);
    const int64_t pieces = (cp > 1 ? 2 * cp : 1) * mesh.degree(Axis::kTp);
    return std::min(longest_, (count + pieces - 1) / pieces * pieces);
  }

  // Of the logits of this rank's tokens, the one at `position`; undefined where
  // it is on another rank, or a replica counts it.
  at::Tensor row_of(const at::Tensor& logits, int64_t length,
                    int64_t position) const {
    if (place(Axis::kDpReplicate) > 0 || place(Axis::kDpShard) > 0) return {};
    const at::Tensor positions = model_.composed().local_tokens(
        at::arange(length, at::kLong).unsqueeze(0))[0];
    const at::Tensor found = at::nonzero(positions == position);
    if (found.numel() == 0) return {};
    return logits[0][found.item<int64_t>()];
  }

  int64_t place(Axis axis) const { return model_.composed().coord[axis]; }

  RankModel& model_;
  comm::Group& world_;
  const int64_t longest_;
  std::vector<int64_t> text_;
};

}  // namespace

void share_out_ranks(RunConfig& config, int64_t world_size) {
  const auto mesh = config.mesh.degrees(world_size, config.zero.stage);
  const int64_t left = mesh.dp_replicate * mesh.dp_shard;
  const bool is_asked_for = config.mesh.dp > 0 ||
                            config.mesh.dp_replicate > 0 ||
                            config.mesh.dp_shard > 0;
  if (left == 1 || is_asked_for) return;
  for (int64_t tp = left; tp >= 1; --tp) {
    if (left % tp != 0) continue;
    RunConfig shared = config;
    shared.mesh.tp *= tp;
    shared.mesh.pp *= left / tp;
    try {
      complete_for_evaluation(shared, world_size);
    } catch (const Error&) {
      continue;  // of other sizes
    }
    config.mesh.tp *= tp;
    config.mesh.pp *= left / tp;
    return;
  }
}

void check_generation(const RunConfig& config, int64_t world_size) {
  const auto mesh = config.mesh.degrees(world_size, config.zero.stage);
  parallel::check_generation(mesh);
  TS_CHECK_CONFIG(config.pipeline.num_chunks() == 1, "pipeline.chunks is ",
                  config.pipeline.num_chunks(),
                  ", but generate goes through each stage once. Nearest: 1.");
  const int64_t data = mesh.dp_replicate * mesh.dp_shard;
  TS_CHECK_CONFIG(data == 1, "mesh: dp_replicate ", mesh.dp_replicate,
                  " x dp_shard ", mesh.dp_shard, " = ", data,
                  " data-parallel ranks, but generate writes one text. "
                  "Nearest: mesh.dp 1, on mesh.pp ",
                  mesh.pp, " x mesh.tp ", mesh.tp, " = ", mesh.pp * mesh.tp,
                  " ranks; mesh.tp and mesh.pp share out a model.");
}

std::vector<int64_t> generate(RankModel& model, comm::Communicator& ranks,
                              const std::vector<int64_t>& prompt,
                              const models::GenerateOptions& options,
                              const models::OnToken& on_token) {
  const auto& config = model.decoder().config();
  Generation generation(model, ranks,
                        models::longest_text(config, prompt, options));
  model.gather_parameters();
  return models::generate(
      config, prompt, options,
      [&](const std::vector<int64_t>& ids, const models::Draw& draw) {
        return generation.next(ids, draw);
      },
      on_token);
}

std::vector<int64_t> generate_by_evaluations(
    RankModel& model, comm::Communicator& ranks, int64_t longest,
    const std::vector<int64_t>& prompt, const models::GenerateOptions& options,
    const models::OnToken& on_token) {
  models::ModelConfig config = model.decoder().config();
  config.max_seq = std::min(config.max_seq, longest);
  Evaluations evaluations(model, ranks.world(), longest);
  return models::generate(
      config, prompt, options,
      [&](const std::vector<int64_t>& ids, const models::Draw& draw) {
        return evaluations.next(ids, draw);
      },
      on_token);
}

}  // namespace tessera::engine

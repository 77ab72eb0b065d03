#include "tessera/train/metrics.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "tessera/comm/host_map.h"
#include "tessera/comm/link.h"
#include "tessera/core/log.h"
#include "tessera/core/sent_bytes.h"
#include "tessera/engine/product_floor.h"
#include "tessera/models/model.h"
#include "tessera/monitor/memory.h"
#include "tessera/monitor/sink.h"
#include "tessera/monitor/throughput.h"
#include "tessera/train/expert_watch.h"
#include "tessera/train/link_watch.h"
#include "tessera/train/straggler_watch.h"

namespace tessera::train {

using engine::RunConfig;
using engine::Traffic;

namespace {

constexpr double kMib = 1024.0 * 1024.0;
constexpr int64_t kStepsBetweenLatencies = 100;
constexpr int64_t kStepsBetweenLinks = 20;  // a round of them
constexpr int64_t kPeakTries = 20;          // of a run

// What each rank tells the others after a step.
enum Field {
  kLoss,
  kWeight,
  kStop,
  kSaving,
  kMemory,
  kCommSeconds,
  kCommBytes,
  kAux,
  kAhead,
  kBubble,
  kExposed,
  kSeconds,  // by kind
  kFields = kSeconds + monitor::kNumSpanKinds
};

Traffic traffic_of(comm::Communicator& ranks) {
  Traffic traffic{.seconds = ranks.seconds_busy()};
  for (comm::Group* group : ranks.groups()) {
    if (group->size() == 1) continue;  // nothing leaves the rank
    for (const auto& verb : group->stats()) {
      traffic.bytes += sent_bytes(verb.verb, verb.bytes);
    }
  }
  return traffic;
}

// The quickest of a few all_reduces of one number.
double latency_us(comm::Group& group) {
  at::Tensor one = at::zeros({1}, at::kFloat);
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(one, comm::ReduceOp::kSum, comm::Mode::kBlocking);
    const std::chrono::duration<double, std::micro> taken =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}

// One round of links, as every rank then knows it.
std::vector<monitor::LinkSpeed> links_of(comm::Group& world, int64_t round) {
  const auto speed = comm::measure_link(world, round);
  at::Tensor mine = at::zeros({2}, at::kDouble);
  if (speed) {
    mine[0] = speed->latency_us;
    mine[1] = speed->bytes_per_s;
  }
  at::Tensor all = at::empty({world.size(), 2}, at::kDouble);
  world.all_gather(all, mine).synchronize();
  std::vector<monitor::LinkSpeed> links;
  for (int64_t r = 0; r < world.size(); ++r) {
    const auto peer = comm::link_peer(r, world.size(), round);
    if (!peer || *peer < r) continue;
    links.push_back({.from = r,
                     .to = *peer,
                     .latency_us = all[r][0].item<double>(),
                     .gbps = all[r][1].item<double>() / 1e9});
  }
  return links;
}

// Means over ranks.
void add_timeline(monitor::StepRecord& record, const double* sum,
                  int64_t num_ranks) {
  const auto ranks = static_cast<double>(num_ranks);
  record.bubble = sum[kBubble] / ranks;
  record.exposed_comm_s = sum[kExposed] / ranks;
  auto& seconds = record.seconds.emplace();
  for (size_t i = 0; i < seconds.size(); ++i) {
    seconds[i] = sum[kSeconds + i] / ranks;
  }
}

std::vector<double> column(const at::Tensor& fields, int64_t field) {
  const at::Tensor values = fields.select(1, field).contiguous();
  const auto* first = values.const_data_ptr<double>();
  return {first, first + values.numel()};
}

// `fields`: (ranks, kFields); `works`: of a step whose timeline was taken.
void add_by_rank(monitor::StepRecord& record, const at::Tensor& fields,
                 const std::vector<double>* works) {
  record.comm_s_by_rank = column(fields, kCommSeconds);
  record.comm_bytes_by_rank = column(fields, kCommBytes);
  record.mem_peak_mib_by_rank = column(fields, kMemory);
  if (works == nullptr) return;
  record.work_s_by_rank = *works;
  record.bubble_by_rank = column(fields, kBubble);
  record.exposed_comm_s_by_rank = column(fields, kExposed);
}

}  // namespace

struct Metrics::Impl {
  const RunConfig& config;
  comm::Communicator& ranks;
  std::unique_ptr<monitor::Sink> sinks;  // on rank 0
  double flops_per_token;
  double peak_flops = 0;
  int64_t peak_tries = 1;
  Traffic before;
  std::optional<double> latency;
  std::vector<monitor::LinkSpeed> links;  // measured since the last record
  int64_t exchanges = 0, link_round = 0;
  LinkWatch lines;
  ExpertWatch experts;
  StragglerWatch stragglers;
  at::Tensor peaks_mib;  // so far, by rank

  Impl(const RunConfig& of, const RunFolder& folder, comm::Communicator& with,
       const mesh::DeviceMesh& mesh, int64_t first_step, double steps_per_epoch,
       int64_t tokens_before, std::optional<double> best_valid_loss)
      : config(of),
        ranks(with),
        flops_per_token(static_cast<double>(
            models::flops_per_token(of.model, of.data.seq_len))),
        lines(comm::hosts_of(with.world())),
        experts(of.model, of.batch.global * of.data.seq_len),
        stragglers(mesh, with.rank(),
                   engine::has_uneven_batch(of) ? of.batch.rows
                                                : std::vector<int64_t>{}) {
    if (ranks.rank() != 0) return;
    peak_flops = engine::product_rate(config);
    sinks = monitor::make_sinks(
        config.monitor,
        {.name = config.run.name,
         .folder = folder.path(),
         .first_step = first_step,
         .total_steps = config.run.steps,
         .world_size = ranks.world_size(),
         .steps_per_epoch = steps_per_epoch,
         .tokens_before = tokens_before,
         .host_memory_mib =
             static_cast<double>(monitor::host_memory_bytes()) / kMib,
         .best_valid_loss = best_valid_loss});
  }

  // A step that was faster than the floor: that was measured while something
  // else computed here. What one took that is told late is known on average
  // alone.
  monitor::Throughput throughput(const monitor::StepRecord& record) {
    const auto found = [&] {
      return monitor::throughput(record.tokens, record.step_s,
                                 ranks.world_size(), flops_per_token,
                                 peak_flops);
    };
    if (config.monitor.losses_late > 0) return found();
    if (found().mfu.value_or(0) > 1 && peak_tries < kPeakTries) {
      ++peak_tries;
      peak_flops = std::max(peak_flops, engine::product_rate(config));
    }
    // The machine does what a step has done.
    peak_flops *= std::max(1.0, found().mfu.value_or(0));
    return found();
  }

  at::Tensor fields_of(const StepShare& share) {
    at::Tensor fields = at::zeros({kFields}, at::kDouble);
    double* field = fields.mutable_data_ptr<double>();
    field[kLoss] = share.loss_sum;
    field[kWeight] = share.weight;
    field[kStop] = share.stop ? 1 : 0;
    field[kSaving] = share.is_saving ? 1 : 0;
    field[kMemory] = share.usage.mem_peak_mib;
    field[kCommSeconds] = share.usage.traffic.seconds;
    field[kCommBytes] = static_cast<double>(share.usage.traffic.bytes);
    field[kAux] = share.aux_sum;
    field[kAhead] = share.ahead_loss;
    if (share.timeline) {
      field[kBubble] = share.timeline->bubble;
      field[kExposed] = share.timeline->exposed_comm_s();
      std::ranges::copy(share.timeline->seconds, field + kSeconds);
    }
    return fields;
  }

  // Now and then: what the network gives.
  void probe_network() {
    comm::Group& world = ranks.world();
    if (world.size() == 1) return;
    const int64_t number = exchanges++;
    if (number % kStepsBetweenLatencies == 0) latency = latency_us(world);
    const bool is_next = number % kStepsBetweenLinks == 0;
    if (!is_next && !lines.wants_again()) return;
    if (is_next) link_round = number / kStepsBetweenLinks;
    links = links_of(world, link_round);
    lines.add(links);
    for (const News& news : lines.take_news()) {
      if (world.rank() == 0) tell(news);
    }
  }

  // This rank of itself: it knows its host.
  void tell_of_stragglers() {
    const auto news = stragglers.take_news();
    if (news) tell(*news);
  }

  void keep_peaks(const at::Tensor& mib) {
    peaks_mib = peaks_mib.defined() ? at::maximum(peaks_mib, mib) : mib.clone();
  }

  // nn::Balance::counts of all ranks; undefined where there are no experts.
  at::Tensor expert_counts(const at::Tensor& mine) {
    const int64_t layers = config.model.layers_with_experts();
    if (layers == 0) return {};
    at::Tensor counts =
        at::zeros({layers, config.model.moe.experts + 2}, at::kDouble);
    if (mine.defined()) counts.copy_(mine);
    if (ranks.world_size() > 1) ranks.world().all_reduce(counts).synchronize();
    return counts;
  }
};

Metrics::Metrics(const RunConfig& config, const RunFolder& folder,
                 comm::Communicator& ranks, const mesh::DeviceMesh& mesh,
                 int64_t first_step, double steps_per_epoch,
                 int64_t tokens_before, std::optional<double> best_valid_loss)
    : impl_(std::make_unique<Impl>(config, folder, ranks, mesh, first_step,
                                   steps_per_epoch, tokens_before,
                                   best_valid_loss)) {}

Metrics::~Metrics() = default;

void Metrics::begin_step() { impl_->before = traffic_of(impl_->ranks); }

Usage Metrics::take_usage() {
  const Traffic now = traffic_of(impl_->ranks);
  const Traffic traffic = now - std::exchange(impl_->before, now);
  const auto bytes = static_cast<double>(monitor::tensor_bytes().peak);
  monitor::reset_tensor_peak();
  return {.traffic = traffic, .mem_peak_mib = bytes / kMib};
}

StepTotals Metrics::exchange(const StepShare& share) {
  comm::Group& world = impl_->ranks.world();
  at::Tensor all = at::empty({world.size(), kFields}, at::kDouble);
  world.all_gather(all, impl_->fields_of(share)).synchronize();
  const at::Tensor counts = impl_->expert_counts(share.expert_counts);
  impl_->probe_network();

  const at::Tensor sums = all.sum(0);
  const at::Tensor worsts = std::get<0>(all.max(0));
  const auto* sum = sums.const_data_ptr<double>();
  const auto* worst = worsts.const_data_ptr<double>();
  StepTotals totals{.stop = worst[kStop] > 0, .is_saving = worst[kSaving] > 0};
  monitor::StepRecord& record = totals.record;
  record.loss = sum[kLoss] / sum[kWeight];
  record.grad_norm = share.grad_norm;
  record.mem_peak_mib = worst[kMemory];
  impl_->keep_peaks(all.select(1, kMemory));
  record.comm_s = worst[kCommSeconds];
  record.comm_bytes = static_cast<int64_t>(worst[kCommBytes]);
  if (record.comm_s > 0) {  // of one rank both
    const int64_t busiest =
        all.select(1, kCommSeconds).argmax().item<int64_t>();
    record.comm_gbps =
        all[busiest][kCommBytes].item<double>() / record.comm_s / 1e9;
  }
  record.comm_latency_us = impl_->latency;
  if (impl_->config.model.layers_with_experts() > 0) {
    record.aux_loss = sum[kAux] * aux_mean(impl_->config);
  }
  if (impl_->config.model.mtp.layers > 0) {  // each rank of tp has the same
    record.mtp_loss = sum[kAhead] / static_cast<double>(impl_->config.mesh.tp);
  }
  if (counts.defined()) impl_->experts.add(counts, record);
  record.links = std::exchange(impl_->links, {});
  if (impl_->config.mesh.pp == 1) record.bubble = 0.0;  // no pipeline
  if (share.timeline) {
    add_timeline(record, sum, world.size());
    impl_->stragglers.add(all.narrow(1, kSeconds, monitor::kNumSpanKinds),
                          record);
    impl_->tell_of_stragglers();
  }
  if (impl_->config.monitor.by_rank && world.size() > 1) {
    add_by_rank(record, all,
                share.timeline ? &impl_->stragglers.works() : nullptr);
  }
  return totals;
}

void Metrics::validated_at_start(const monitor::Validation& validation) {
  if (impl_->sinks) impl_->sinks->validated_at_start(validation);
}

void Metrics::record(monitor::StepRecord record) {
  if (!impl_->sinks) return;
  const std::string warning = impl_->experts.warning();
  if (!warning.empty()) log::warning(warning);
  const auto& config = impl_->config;
  // A rank that waits for the first one to write the last step's line begins
  // the step before it, by as much.
  const auto cut = [&](double& seconds) {
    seconds = std::min(seconds, record.step_s);
  };
  const double uncut = record.comm_s;
  cut(record.comm_s);
  if (record.comm_gbps) *record.comm_gbps *= uncut / record.comm_s;
  if (record.exposed_comm_s) cut(*record.exposed_comm_s);
  std::ranges::for_each(record.comm_s_by_rank, cut);
  std::ranges::for_each(record.exposed_comm_s_by_rank, cut);
  record.tokens = config.batch.global * config.data.seq_len;
  const auto speed = impl_->throughput(record);
  record.tokens_per_s = speed.tokens_per_s;
  record.tflops = speed.tflops;
  record.mfu = speed.mfu;
  impl_->sinks->step(record);
}

void Metrics::sync() {
  if (impl_->sinks) impl_->sinks->sync();
}

void Metrics::close(const monitor::RunEnd& end) {
  if (!impl_->sinks) return;
  monitor::RunEnd whole = end;
  whole.peak_tflops = impl_->peak_flops / 1e12;
  for (comm::Group* group : impl_->ranks.groups()) {
    for (const auto& verb : group->stats()) {
      whole.traffic.push_back({.group = group->name(),
                               .verb = verb.verb,
                               .calls = verb.calls,
                               .bytes = verb.bytes,
                               .seconds = verb.seconds});
    }
  }
  whole.links = impl_->lines.links();
  whole.ranks = impl_->stragglers.ranks();
  for (auto& of : whole.ranks) {
    if (!impl_->peaks_mib.defined()) break;  // no step was told
    of.mem_peak_mib = impl_->peaks_mib[of.rank].item<double>();
  }
  impl_->sinks->close(whole);
}

}  // namespace tessera::train

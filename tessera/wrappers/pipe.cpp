#include "tessera/wrappers/pipe.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "tessera/core/error.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera {
namespace {

namespace schedules = program::schedules;

std::vector<int64_t> costs_of(const torch::nn::Sequential& whole, CutBy by) {
  std::vector<int64_t> costs;
  for (const auto& child : whole->children()) {
    int64_t cost = 1;
    for (const at::Tensor& parameter : child->parameters()) {
      if (by == CutBy::kParameters) cost += parameter.numel();
    }
    costs.push_back(cost);
  }
  return costs;
}

// Children of each part when none may cost more than `most`: as many as fit,
// but so that one is left for each part behind. Empty: they do not fit.
std::vector<int64_t> lengths_within(const std::vector<int64_t>& costs,
                                    int64_t parts, int64_t most) {
  const auto count = static_cast<int64_t>(costs.size());
  std::vector<int64_t> lengths;
  int64_t next = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = next, behind = parts - 1 - part;
    int64_t sum = 0;
    while (next < count - behind && sum + costs[next] <= most) {
      sum += costs[next++];
    }
    if (next == first) return {};
    lengths.push_back(next - first);
  }
  return next == count ? lengths : std::vector<int64_t>();
}

// The smallest bound that suffices, found by halving.
std::vector<int64_t> even_lengths(const std::vector<int64_t>& costs,
                                  int64_t parts) {
  int64_t low = std::ranges::max(costs);
  int64_t high = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (lengths_within(costs, parts, middle).empty()) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return lengths_within(costs, parts, low);
}

void check_untied(const std::vector<torch::nn::Sequential>& parts) {
  std::set<const void*> seen;
  for (const torch::nn::Sequential& part : parts) {
    std::set<const void*> here;
    for (const auto& named : part->named_parameters()) {
      const void* const which = named.value().unsafeGetTensorImpl();
      TS_CHECK_CONFIG(!seen.contains(which), "split: the parameter ",
                      named.key(),
                      " is in a part before too. Tied weights stay together: "
                      "give lengths that keep them in one part.");
      here.insert(which);
    }
    seen.merge(here);
  }
}

std::vector<torch::nn::Sequential> own_parts(const torch::nn::Sequential& whole,
                                             const program::Pipeline& pipeline,
                                             int64_t rank, CutBy by) {
  const auto parts = split(whole, pipeline.num_runs(), by);
  std::vector<torch::nn::Sequential> own;
  for (int64_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
    own.push_back(parts[pipeline.run_of({rank, chunk})]);
  }
  return own;
}

program::Pipeline pipeline_of(const std::string& name, int64_t stages,
                              int64_t chunks) {
  const auto known = schedules::names();
  const bool is_known = std::ranges::count(known, name) > 0;  // else refused
  return {stages, chunks,
          is_known ? schedules::named(name).placement
                   : program::Placement::kRoundRobin};
}

std::vector<PipelineStage> stages_of(
    const std::vector<torch::nn::Sequential>& parts,
    const program::Pipeline& pipeline, int64_t rank) {
  std::vector<PipelineStage> stages;
  for (size_t chunk = 0; chunk < parts.size(); ++chunk) {
    const int64_t run = pipeline.run_of({rank, static_cast<int64_t>(chunk)});
    stages.emplace_back(parts[chunk], run, pipeline.num_runs());
  }
  return stages;
}

}  // namespace

std::vector<torch::nn::Sequential> split(const torch::nn::Sequential& whole,
                                         int64_t parts, CutBy by) {
  const auto costs = costs_of(whole, by);
  TS_CHECK_CONFIG(parts >= 1 && parts <= std::ssize(costs), "split: ", parts,
                  " parts of ", costs.size(),
                  " children. A part has one child or more.");
  return split(whole, even_lengths(costs, parts));
}

std::vector<torch::nn::Sequential> split(const torch::nn::Sequential& whole,
                                         const std::vector<int64_t>& lengths) {
  const auto count = static_cast<int64_t>(whole->size());
  const bool all_have_some =
      std::ranges::all_of(lengths, [](int64_t n) { return n > 0; });
  TS_CHECK_CONFIG(
      all_have_some &&
          std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == count,
      "split: parts of ", at::IntArrayRef(lengths),
      " children do not add up to the ", count,
      " that there are, with one or more in each.");
  const auto children = whole->named_children();
  std::vector<torch::nn::Sequential> parts;
  auto next = whole->begin();
  size_t child = 0;
  for (const int64_t length : lengths) {
    torch::nn::Sequential part;
    part->train(whole->is_training());  // not the children, each as it is
    for (int64_t i = 0; i < length; ++i) {
      part->push_back(children[child++].key(), *next++);
    }
    parts.push_back(std::move(part));
  }
  check_untied(parts);
  return parts;
}

Pipe::Pipe(const torch::nn::Sequential& whole, comm::Group& ranks,
           const ScheduleOptions& options, int64_t chunks, CutBy by)
    : parts_(own_parts(whole,
                       pipeline_of(options.schedule, ranks.size(), chunks),
                       ranks.rank(), by)),
      schedule_(
          stages_of(parts_, pipeline_of(options.schedule, ranks.size(), chunks),
                    ranks.rank()),
          ranks, options) {}

std::vector<at::Tensor> Pipe::parameters() const {
  std::vector<at::Tensor> all;
  for (const torch::nn::Sequential& part : parts_) {
    for (const at::Tensor& each : part->parameters()) all.push_back(each);
  }
  return all;
}

}  // namespace tessera

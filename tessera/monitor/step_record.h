// What is known of a step, of a run and of its end: what sinks are told.
//
// A StepRecord is a line of metrics.jsonl: names and units are the contract's,
// which fields.h lists.
// Rates per second are of the whole world unless a name says "of a rank".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/monitor/span.h"

namespace tessera::monitor {

// The mean loss over held-out tokens after a step.
struct Validation {
  double loss = 0;
  int64_t tokens = 0;
  double seconds = 0;
};

// A text that the model wrote after a step.
struct Sample {
  std::string prompt;
  std::string text;  // behind it
  int64_t tokens = 0;
  double seconds = 0;
};

// Of a link between two ranks, measured now and then.
struct LinkSpeed {
  int64_t from = 0;  // ranks; from < to
  int64_t to = 0;
  double latency_us = 0;  // one way
  double gbps = 0;        // 10^9 bytes per second, as comm_gbps
};

struct StepRecord {
  int64_t step = 0;      // from 1: the step that has just been taken
  double loss = 0;       // cross-entropy alone, mean over the global batch
  double grad_norm = 0;  // before clipping
  double lr = 0;         // that this step used
  int64_t tokens = 0;    // positions of the step's global batch
  double step_s = 0;
  double tokens_per_s = 0;
  std::optional<double> tflops;  // of a rank; unknown: null
  std::optional<double> mfu;     // 0..1 of a rank's peak
  double mem_peak_mib = 0;       // of the worst rank
  double comm_s = 0;  // of the worst rank: in which something was under way
  int64_t comm_bytes = 0;  // of the worst rank, which may be another
  std::optional<double> comm_latency_us;
  std::optional<double> comm_gbps;  // of the rank that has comm_s
  // Means over ranks, of a step whose timeline was taken: see timeline.h.
  std::optional<double> bubble;  // share of the step

  // Only where they apply; absent from the line else.
  std::optional<double> exposed_comm_s;
  std::optional<SecondsByKind> seconds;
  // In which a rank's computing thread worked, without its waits: mean over
  // ranks, and of the one that worked longest.
  std::optional<double> work_s, work_max_s;
  std::optional<int64_t> slowest_rank;
  // The figures above of every rank, where monitor.by_rank asks for them.
  std::vector<double> work_s_by_rank, comm_s_by_rank, exposed_comm_s_by_rank,
      comm_bytes_by_rank, bubble_by_rank, mem_peak_mib_by_rank;
  std::optional<double> loss_scale;  // that this step used
  bool was_skipped = false;          // it updated nothing; in the summary alone
  std::optional<double> aux_loss;
  std::optional<double> mtp_loss;   // mean over depths
  std::vector<double> expert_load;  // each one's share of all rows
  // By layer with experts: the largest load over the mean, the share of choices
  // that were dropped, and the mean entropy of a token's probabilities in nats.
  std::vector<double> expert_imbalance, expert_dropped, routing_entropy;
  std::optional<Validation> validation;  // its loss is valid_loss
  std::optional<Sample> sample;          // its seconds are sample_s
  // The step whose checkpoint could not be written: told once it is known.
  std::optional<int64_t> checkpoint_failed;
  // Those measured after this step; in TensorBoard alone.
  std::vector<LinkSpeed> links;
};

struct RunInfo {
  std::string name;
  std::string folder;      // RUN_DIR/NAME
  int64_t first_step = 0;  // steps done before this start; 0: a new run
  int64_t total_steps = 0;
  int64_t world_size = 1;
  double steps_per_epoch = 0;  // 0: unknown
  // That a run which began with another batch, or length of sequences, took
  // beyond (or below) what its steps take now.
  int64_t tokens_before = 0;
  double host_memory_mib = 0;                  // 0: unknown
  std::optional<double> best_valid_loss = {};  // of the starts before
};

// What one rank moved through one group by one verb, since the start.
struct GroupTraffic {
  std::string group;
  std::string verb;
  int64_t calls = 0;
  int64_t bytes = 0;
  double seconds = 0;  // from the calls until they were done
};

// What one rank did in the steps of this start.
struct RankWork {
  int64_t rank = 0;
  double work_s = 0;       // of the computing thread, without its waits
  double wait_s = 0;       // for others
  int64_t slowest_in = 0;  // steps in which it worked longest of all
  double mem_peak_mib = 0;
};

struct RunEnd {
  std::string reason = "done";  // done | stopped | failed | rewound
  int exit_code = 0;
  std::string message = {};                // of the error, where it failed
  std::vector<GroupTraffic> traffic = {};  // of rank 0
  std::vector<RankWork> ranks = {};        // none of a run of one
  // As last measured: within hosts of each two ranks, of each two hosts the
  // best; of both those of slowest_and_median().
  std::vector<LinkSpeed> links = {};
  std::optional<double> peak_tflops = {};  // of a rank: what mfu compares with
  int64_t rewinds = 0;  // times that the run went back from a spike
};

}  // namespace tessera::monitor

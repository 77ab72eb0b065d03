// A rank's timeline as a file that Perfetto (ui.perfetto.dev) and
// chrome://tracing open: a process for each rank, a track for each lane, spans
// as slices, messages as arrows between ranks.
//
//   TraceWriter trace(folder, rank, "dp=0 pp=1", {"compute", "messages"});
//   trace.add(spans_of_a_step);                      // step after step
//   trace.write();                                   // folder/rank-N.json
//   merge_traces(folder, world_size);                // folder/trace.json
//
// Errors: TS_CHECK_IO names the file. Files are written whole or not at all.
// Source: "Trace Event Format", the JSON of Chrome: events X, s, f and M; one
//         event a line, so that files are merged as text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/monitor/span.h"

namespace tessera::monitor {

class TraceWriter {
 public:
  // `lanes`: their names; spans name them by number. `ahead_s`: is added to all
  // times, where clocks of hosts differ. `max_bytes`: of events that are kept
  // in memory until write(); what more is added is left out, with a warning.
  TraceWriter(const std::string& folder, int64_t rank,
              const std::string& coordinates,
              const std::vector<std::string>& lanes, double ahead_s = 0,
              int64_t max_bytes = int64_t{256} << 20);

  // Of a step. Refuses spans of a lane that overlap in part, and unknown lanes.
  void add(const std::vector<Span>& spans);
  void write() const;

 private:
  void add_event(const std::string& event);

  std::string path_;
  int64_t rank_;
  int64_t num_lanes_;
  double ahead_s_;
  int64_t max_bytes_;
  bool is_full_ = false;
  std::string events_;  // with commas and ends of lines between them
};

// REQUIRES: every rank has written. The files of the ranks stay; those that a
// run on more ranks left here go.
void merge_traces(const std::string& folder, int64_t world_size);

}  // namespace tessera::monitor

// The schedules that there are: a new one is a file pair and a line here.
#include "tessera/program/schedules/bfs.h"
#include "tessera/program/schedules/dualpipe.h"
#include "tessera/program/schedules/dualpipe_v.h"
#include "tessera/program/schedules/eager_1f1b.h"
#include "tessera/program/schedules/gpipe.h"
#include "tessera/program/schedules/interleaved.h"
#include "tessera/program/schedules/interleaved_zb.h"
#include "tessera/program/schedules/naive.h"
#include "tessera/program/schedules/one_forward_one_backward.h"
#include "tessera/program/schedules/pipedream_2bw.h"
#include "tessera/program/schedules/schedule.h"
#include "tessera/program/schedules/zb_h1.h"
#include "tessera/program/schedules/zb_h2.h"
#include "tessera/program/schedules/zb_v.h"

namespace tessera::program::schedules {

const std::vector<Schedule>& all() {
  static const std::vector<Schedule> list = {
      {.name = "naive", .turns = naive, .meaning = "one micro-batch at a time"},
      {.name = "gpipe",
       .turns = gpipe,
       .meaning = "all forwards, then all backwards",
       .source = "arXiv 1811.06965"},
      {.name = "1f1b",
       .turns = one_forward_one_backward,
       .meaning = "forward and backward in turn",
       .source = "arXiv 2006.09503"},
      {.name = "eager_1f1b",
       .turns = eager_1f1b,
       .meaning = "1f1b with twice the forwards ahead, for slow links",
       .source = "arXiv 2211.05322"},
      {.name = "interleaved",
       .turns = interleaved,
       .chunked = true,
       .multiple_of_stages = true,
       .meaning = "1f1b over several chunks a rank",
       .source = "arXiv 2104.04473"},
      {.name = "bfs",
       .turns = bfs,
       .chunked = true,
       .sends_wait = true,
       .meaning = "all forwards breadth first over chunks, then all backwards",
       .source = "arXiv 2211.05953"},
      {.name = "zb_h1",
       .turns = zb_h1,
       .sends_wait = true,
       .meaning =
           "1f1b, weights' gradients late: two thirds of its bubble gone",
       .source = "arXiv 2401.10241"},
      {.name = "zb_h2",
       .turns = zb_h2,
       .sends_wait = true,
       .meaning = "zb_h1 with twice the micro-batches alive: between a rank's "
                  "first and last task it waits for none",
       .source = "arXiv 2401.10241"},
      {.name = "interleaved_zb",
       .turns = interleaved_zb,
       .chunked = true,
       .multiple_of_stages = true,
       .sends_wait = true,
       .meaning = "interleaved, weights' gradients late",
       .source = "arXiv 2401.10241"},
      {.name = "zb_v",
       .turns = zb_v,
       .placement = Placement::kV,
       .chunked = true,
       .exact_chunks = 2,
       .sends_wait = true,
       .meaning = "two chunks there and back, hardly a bubble in 1f1b's memory",
       .source = "arXiv 2405.15362"},
      {.name = "dualpipe",
       .turns = dualpipe,
       .placement = Placement::kMirrored,
       .chunked = true,
       .exact_chunks = 2,
       .in_pairs = true,
       .sends_wait = true,
       .meaning = "two replicas of the stages, from both ends",
       .source = "arXiv 2412.19437"},
      {.name = "dualpipe_v",
       .turns = dualpipe_v,
       .placement = Placement::kV,
       .chunked = true,
       .exact_chunks = 2,
       .sends_wait = true,
       .meaning = "dualpipe cut in half: two chunks there and back",
       .source = "github.com/deepseek-ai/DualPipe"},
      {.name = "pipedream_2bw",
       .turns = pipedream_2bw,
       .delayed = true,
       .meaning = "1f1b without a flush between steps: gradients are of the "
                  "weights one update before",
       .source = "arXiv 2006.09503"},
  };
  return list;
}

}  // namespace tessera::program::schedules

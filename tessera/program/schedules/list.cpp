// The schedules that there are: a new one is a file pair and a line here.
#include "tessera/program/schedules/bfs.h"
#include "tessera/program/schedules/eager_1f1b.h"
#include "tessera/program/schedules/gpipe.h"
#include "tessera/program/schedules/interleaved.h"
#include "tessera/program/schedules/naive.h"
#include "tessera/program/schedules/one_forward_one_backward.h"
#include "tessera/program/schedules/schedule.h"

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
  };
  return list;
}

}  // namespace tessera::program::schedules

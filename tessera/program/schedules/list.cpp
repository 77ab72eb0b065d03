// The schedules that there are: a new one is a file pair and a line here.
#include "tessera/program/schedules/gpipe.h"
#include "tessera/program/schedules/interleaved.h"
#include "tessera/program/schedules/naive.h"
#include "tessera/program/schedules/one_forward_one_backward.h"
#include "tessera/program/schedules/schedule.h"

namespace tessera::program::schedules {

const std::vector<Schedule>& all() {
  static const std::vector<Schedule> list = {
      {"naive", naive, /*chunked=*/false, "one micro-batch at a time", ""},
      {"gpipe", gpipe, /*chunked=*/false, "all forwards, then all backwards",
       "arXiv 1811.06965"},
      {"1f1b", one_forward_one_backward, /*chunked=*/false,
       "forward and backward in turn", "arXiv 2006.09503"},
      {"interleaved", interleaved, /*chunked=*/true,
       "1f1b over several chunks a rank", "arXiv 2104.04473"},
  };
  return list;
}

}  // namespace tessera::program::schedules

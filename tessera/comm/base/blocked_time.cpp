#include "tessera/comm/base/blocked_time.h"

#include "tessera/comm/group.h"

namespace tessera::comm {
namespace {

thread_local double blocked_s = 0;

}  // namespace

BlockedTime::~BlockedTime() {
  if (!counts_) return;
  blocked_s += std::chrono::duration<double>(Clock::now() - begin_).count();
}

double seconds_blocked() { return blocked_s; }

}  // namespace tessera::comm

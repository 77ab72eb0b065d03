#include "tessera/comm/base/backend_work.h"

#include <ATen/ATen.h>

#include "tessera/comm/base/blocked_time.h"
#include "tessera/comm/base/timed_out.h"
#include "tessera/core/device.h"

namespace tessera::comm {
namespace {

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

// The ranks are asked where the backend itself cannot tell who is missing.
std::string verdict_of(GroupState& state, const Operation& operation,
                       const Failure& failure) {
  const bool peers_are_missing = failure.code == ExitCode::kUnreachable;
  if (!state.judge.verdict || !peers_are_missing) return "";
  if (state.names_peers && !failure.timed_out) {
    state.judge.record();
    return "";
  }
  return state.judge.verdict(state.report(), operation, failure.text);
}

}  // namespace

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return {.code = e.exit_code(), .text = message_of(e)};
  } catch (const TimedOut& e) {
    return {.text = message_of(e), .timed_out = true};
  } catch (const std::exception& e) {
    const std::string text = message_of(e);
    return {.text = text, .timed_out = tells_of_time_out(text)};
  }
}

std::string explain(const GroupInfo& info, const Operation& operation,
                    const std::string& cause) {
  return c10::str(operation.describe(), " on group '", info.name, "' (",
                  info.ranks.size(), " ranks, ", info.backend, "): ", cause,
                  " (after ", operation.seconds_so_far(), " s; time-out ",
                  seconds(info.timeout), " s)");
}

void rethrow_explained(GroupState& state, const Operation& operation,
                       uint64_t ticket) {
  const Failure failure = failure_of(std::current_exception());
  std::string text = explain(state.info, operation, failure.text);
  const std::string verdict = verdict_of(state, operation, failure);
  if (!verdict.empty()) text += ". Verdict: " + verdict;
  state.recorder.end(ticket, true);
  state.note_failure(text);
  detail::throw_error(failure.code, text, {__func__, __FILE__, __LINE__});
}

void BackendWork::wait() {
  const BlockedTime blocked;
  try {
    work->wait();
    state->recorder.end(ticket, false);
  } catch (const std::exception&) {
    rethrow_explained(*state, operation, ticket);
  }
}

void BackendWork::synchronize() {
  wait();
  if (operation.device.is_cpu()) return;
  const BlockedTime blocked;
  wait_for_device(operation.device);
}

void BackendWork::watch_completion() {
  work->getFuture()->addCallback(
      [state = state, operation = operation,
       ticket = ticket](c10::ivalue::Future& future) {
        state->recorder.end(ticket, future.hasError());
        if (!future.hasError()) return;
        state->note_failure(explain(state->info, operation,
                                    failure_of(future.exception_ptr()).text));
      });
}

void Work::wait() {
  if (impl_) impl_->wait();
}

void Work::synchronize() {
  if (impl_) impl_->synchronize();
}

bool Work::done() const { return !impl_ || impl_->done(); }

}  // namespace tessera::comm

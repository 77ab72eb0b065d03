#include "tessera/comm/base/backend_work.h"

#include <ATen/ATen.h>

#include <optional>

#include "tessera/comm/base/blocked_time.h"
#include "tessera/comm/base/histories.h"
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
  const bool is_of_peers = peers_are_missing || failure.ranks_differ;
  if (!state.judge.verdict || !is_of_peers) return "";
  const bool names_peers = state.names_peers && operation.device.is_cpu();
  if (names_peers && !failure.timed_out && !failure.ranks_differ) {
    state.judge.record();
    return "";
  }
  return state.judge.verdict({.group = state.report(),
                              .failed = operation,
                              .why = failure.text,
                              .ranks_differ = failure.ranks_differ});
}

// The end of an operation that failed, in words that the group keeps.
std::string judged(GroupState& state, const Operation& operation,
                   uint64_t ticket, const Failure& failure) {
  const std::string lost = state.info.lost ? state.info.lost->text() : "";
  if (!lost.empty() && state.judge.record) state.judge.record();
  std::string text =
      explain(state.info, operation, lost.empty() ? failure.text : lost);
  const std::string verdict =
      lost.empty() ? verdict_of(state, operation, failure) : "";
  if (!verdict.empty()) text += ". Verdict: " + verdict;
  state.recorder.end(ticket, true);
  state.failure.note(text);
  return text;
}

// Of a device, on its backend's thread: the rank hears of it at its next call.
void judge_of_device(GroupState& state, const Operation& operation,
                     uint64_t ticket, const Failure& failure) {
  const std::string text = judged(state, operation, ticket, failure);
  if (state.info.rank_failure) state.info.rank_failure->note(text);
}

}  // namespace

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return {.code = e.exit_code(), .text = message_of(e)};
  } catch (const TimedOut& e) {
    return {.text = message_of(e), .timed_out = true};
  } catch (const RanksDiffer& e) {
    return {
        .code = ExitCode::kFailed, .text = message_of(e), .ranks_differ = true};
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
  detail::throw_error(failure.code, judged(state, operation, ticket, failure),
                      {__func__, __FILE__, __LINE__});
}

void BackendWork::wait() {
  const BlockedTime blocked;
  try {
    work->wait();
    // A device may have it to do still.
    if (work->isCompleted()) state->recorder.end(ticket, false);
  } catch (const std::exception&) {
    const std::string told = state->failure_so_far();
    TS_CHECK_REACH(operation.device.is_cpu() || told.empty(), told);
    rethrow_explained(*state, operation, ticket);
  }
}

void BackendWork::synchronize() {
  wait();
  if (operation.device.is_cpu()) return;
  {
    const BlockedTime blocked;
    wait_for_device(operation.device);
  }
  wait();  // throws where the device went on because it was given up
}

void BackendWork::watch_completion() {
  // The future belongs to the work.
  const auto* timed = dynamic_cast<const TimedWork*>(work.get());
  work->getFuture()->addCallback([state = state, operation = operation,
                                  ticket = ticket,
                                  timed](c10::ivalue::Future& future) {
    if (!future.hasError()) {
      return state->recorder.end(
          ticket, false,
          timed ? std::optional(timed->seconds()) : std::nullopt);
    }
    const Failure failure = failure_of(future.exception_ptr());
    if (!operation.device.is_cpu()) {
      return judge_of_device(*state, operation, ticket, failure);
    }
    state->recorder.end(ticket, true);
    state->failure.note(explain(state->info, operation, failure.text));
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

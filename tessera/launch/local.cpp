#include "tessera/launch/local.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>

#include "tessera/core/error.h"
#include "tessera/core/screen.h"
#include "tessera/launch/cores.h"
#include "tessera/launch/detail/rank_output.h"
#include "tessera/launch/detail/rank_process.h"
#include "tessera/launch/detail/signal_queue.h"
#include "tessera/launch/detail/verdict.h"
#include "tessera/launch/environment.h"
#include "tessera/launch/signals.h"
#include "tessera/monitor/console.h"

namespace tessera::launch {
namespace {

using Clock = std::chrono::steady_clock;
using detail::RankEnd;

namespace fs = std::filesystem;

// Milliseconds until what nobody read is shown once more, and until ranks are
// looked at.
constexpr int kShowAgain = 200;
constexpr int kLookAgain = 500;

struct Rank {
  detail::RankProcess process;
  detail::RankOutput output;
  bool is_stopped = false;
};

// Where it cannot be told, it is not.
bool can_be_copied() {
  std::error_code error;
  const fs::directory_iterator threads("/proc/self/task", error);
  return !error && std::distance(begin(threads), end(threads)) == 1 &&
         show_kept();
}

// Of the loopback, at this moment; 0: none is to be had.
uint16_t free_port() {
  const Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  const bool is_bound = bind(listener.get(), any, size) == 0 &&
                        getsockname(listener.get(), any, &size) == 0;
  return is_bound ? ntohs(address.sin_port) : 0;
}

std::string words_of_stop(int signal, int64_t process) {
  const std::string stopped =
      c10::str(" is stopped, by ", detail::signal_name(signal),
               ": the other ranks wait for it. ");
  if (signal == SIGTTIN || signal == SIGTTOU) {
    return stopped +
           "It asked for the terminal, which ranks have not: give it what it "
           "asks for by a file or its environment";
  }
  return c10::str(stopped, "It goes on by 'kill -CONT ", process, "'");
}

class LocalRun {
 public:
  explicit LocalRun(const LocalOptions& options)
      : options_(options), oom_kills_before_(detail::kernel_oom_kills()) {}

  int run() {
    start();
    while (num_running() > 0 && !gives_up()) {
      wait_for_events();
      keep_deadlines();
    }
    const int code = conclude();
    note_late_signals();
    return code;
  }

 private:
  void start();
  std::vector<std::string> variables_of(int64_t rank) const;
  int64_t num_running() const;
  void wait_for_events();
  int poll_timeout_ms() const;
  void read_output(Rank& rank);
  void note_ends(std::vector<RankEnd> ends);
  void tell_stops();
  void obey(int signal);
  void send_all(int signal);
  void terminate_all();
  void kill_all();
  void keep_deadlines();
  bool gives_up() const;
  void abandon();
  int conclude();
  void note_late_signals();

  const LocalOptions& options_;
  detail::SignalQueue signals_;
  Fd store_;
  std::string master_port_;  // for programs that are not copies
  std::vector<Rank> ranks_;
  int64_t oom_kills_before_;

  std::optional<RankEnd> failure_;
  std::optional<Clock::time_point> terminate_at_;
  std::optional<Clock::time_point> kill_at_;
  std::optional<Clock::time_point> give_up_at_;  // all were killed
  int passed_on_ = 0;                            // the first stop signal
  Clock::time_point passed_on_at_;
  int forced_ = 0;        // the second one
  bool stopped_ = false;  // a rank ended with 75
};

void LocalRun::start() {
  store_ = Fd(memfd_create("tessera-store", MFD_CLOEXEC));
  TS_CHECK(store_.open(), "launch: no file in memory for the ranks' store: ",
           std::strerror(errno), ".");
  if (!options_.log_dir.empty()) {
    std::error_code error;
    fs::create_directories(options_.log_dir, error);
    TS_CHECK_IO(!error, "launch: cannot make the folder of the logs, ",
                options_.log_dir, ": ", error.message(), ".");
  }
  if (!options_.as_copy) master_port_ = std::to_string(free_port());
  detail::RankProgram program;
  program.argv = options_.argv;
  program.inherited_fd = store_.get();
  if (options_.as_copy && can_be_copied()) {
    program.as_copy = options_.as_copy;
#ifdef __GLIBC__
    malloc_trim(0);  // what was freed (core/kept_memory.h) is not to be shared
#endif
  }
  for (int64_t rank = 0; rank < options_.nproc; ++rank) {
    const std::string log =
        options_.log_dir.empty()
            ? ""
            : c10::str(options_.log_dir, "/rank-", rank, ".log");
    detail::RankOutput output(rank, log);
    program.environment = variables_of(rank);
    ranks_.push_back(
        {.process = detail::RankProcess(program), .output = std::move(output)});
  }
}

std::vector<std::string> LocalRun::variables_of(int64_t rank) const {
  Variables all = process_variables();
  if (!options_.as_copy) {
    all.emplace("OMP_NUM_THREADS",  // unless set
                std::to_string(share_of_cores(options_.nproc)));
  }
  if (isatty(STDERR_FILENO)) all[monitor::kTerminalVariable] = "1";
  for (const auto& [name, value] : options_.environment) all[name] = value;
  const std::string number = std::to_string(rank);
  const std::string count = std::to_string(options_.nproc);
  all["TESSERA_RANK"] = all["TESSERA_LOCAL_RANK"] = number;
  all["TESSERA_WORLD_SIZE"] = all["TESSERA_LOCAL_WORLD_SIZE"] = count;
  all["TESSERA_NODE"] = "0";
  all["TESSERA_STORE"] = c10::str("/proc/self/fd/", store_.get());
  if (!options_.as_copy) {
    all["RANK"] = all["LOCAL_RANK"] = number;
    all["WORLD_SIZE"] = all["LOCAL_WORLD_SIZE"] = count;
    all["GROUP_RANK"] = "0";
    all.emplace("MASTER_ADDR", kLoopback);  // unless set
    all.emplace("MASTER_PORT", master_port_);
  }
  std::vector<std::string> list;
  for (const auto& [name, value] : all) list.push_back(name + "=" + value);
  return list;
}

int64_t LocalRun::num_running() const {
  return std::count_if(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.process.running(); });
}

void LocalRun::wait_for_events() {
  std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
  for (Rank& rank : ranks_) {  // a negative descriptor is passed over
    fds.push_back({rank.process.pidfd(), POLLIN, 0});
    fds.push_back({rank.process.stderr_pipe().get(), POLLIN, 0});
  }
  if (poll(fds.data(), fds.size(), poll_timeout_ms()) < 0) return;
  std::vector<RankEnd> ends;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (fds[2 * i + 2].revents != 0) read_output(ranks_[i]);
    if (fds[2 * i + 1].revents == 0) continue;
    const int status = ranks_[i].process.reap();
    read_output(ranks_[i]);
    ends.push_back({static_cast<int64_t>(i), status});
  }
  note_ends(std::move(ends));
  tell_stops();
  while (const int signal = signals_.next()) obey(signal);
}

int LocalRun::poll_timeout_ms() const {
  std::optional<Clock::time_point> next = terminate_at_;
  for (const auto& other : {kill_at_, give_up_at_}) {
    if (other && (!next || *other < *next)) next = other;
  }
  const int64_t most = show_kept() ? kLookAgain : kShowAgain;
  if (!next) return static_cast<int>(most);
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, most));
}

void LocalRun::read_output(Rank& rank) {
  Fd& pipe = rank.process.stderr_pipe();
  if (!pipe.open() || rank.output.drain(pipe.get())) return;
  rank.output.flush();
  pipe = Fd();
}

void LocalRun::note_ends(std::vector<RankEnd> ends) {
  // Of ends seen at the same time, a kill is nearer to the cause than an exit.
  std::stable_sort(ends.begin(), ends.end(), [](auto& a, auto& b) {
    return WIFSIGNALED(a.status) > WIFSIGNALED(b.status);
  });
  for (const RankEnd& end : ends) {
    if (detail::is_orderly(end.status)) {
      stopped_ |= detail::exit_code_of(end.status) != 0;
      continue;
    }
    const int nearness = detail::nearness(end.status);
    const bool nearer = failure_ && terminate_at_ &&
                        nearness > detail::nearness(failure_->status);
    if (failure_ && !nearer) continue;
    failure_ = end;
    if (nearness < detail::kNearest) {
      if (!terminate_at_) terminate_at_ = Clock::now() + options_.settle;
    } else {
      terminate_all();
    }
  }
}

// Those that wait for it would say so only when their time is out.
void LocalRun::tell_stops() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    const auto stop = rank.process.take_stop();
    if (!stop || (*stop != 0) == rank.is_stopped) continue;
    rank.is_stopped = *stop != 0;
    const std::string name =
        c10::str("tessera: rank ", i, " (process ", rank.process.pid(), ")");
    const std::string words =
        rank.is_stopped ? words_of_stop(*stop, rank.process.pid()) : " goes on";
    show_on_screen(c10::str(name, words, "\n"));
  }
}

void LocalRun::obey(int signal) {
  if (options_.was_asked != nullptr) *options_.was_asked = true;
  // A terminal, a batch system and `timeout` send one signal to a launcher and
  // to its group: the same one at once is the same request.
  const int request = signal == SIGHUP ? SIGTERM : signal;
  if (request == passed_on_ &&
      Clock::now() - passed_on_at_ < StopRequest::kMerge) {
    return;
  }
  if (passed_on_ != 0 || failure_) {
    if (!failure_) forced_ = signal;
    kill_all();
    return;
  }
  passed_on_ = request;
  passed_on_at_ = Clock::now();
  send_all(passed_on_);
}

void LocalRun::send_all(int signal) {
  for (const Rank& rank : ranks_) rank.process.send(signal);
}

void LocalRun::terminate_all() {
  terminate_at_.reset();
  kill_at_ = Clock::now() + options_.grace;
  send_all(SIGTERM);
}

void LocalRun::keep_deadlines() {
  const auto now = Clock::now();
  if (terminate_at_ && now >= *terminate_at_) terminate_all();
  if (kill_at_ && now >= *kill_at_) {
    kill_at_.reset();
    kill_all();
  }
}

void LocalRun::kill_all() {
  send_all(SIGKILL);
  if (!give_up_at_) give_up_at_ = Clock::now() + options_.give_up;
}

bool LocalRun::gives_up() const {
  return give_up_at_ && Clock::now() >= *give_up_at_;
}

// A rank that even SIGKILL does not end stands in the kernel: on a file system
// that does not answer, or frozen by its control group.
void LocalRun::abandon() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    detail::RankProcess& process = ranks_[i].process;
    if (!process.running()) continue;
    show_on_screen(c10::str(
        "tessera: rank ", i, " (process ", process.pid(),
        ") does not end, not even by SIGKILL: it stands in the kernel, on a "
        "file system that does not answer or in a frozen control group. It "
        "is left behind\n"));
    process.abandon();
  }
}

int LocalRun::conclude() {
  abandon();
  for (Rank& rank : ranks_) {
    read_output(rank);
    rank.output.flush();
  }
  if (forced_ != 0) {
    show_on_screen(c10::str("tessera: ended at once by a second signal, ",
                            detail::signal_name(forced_), "\n"));
    return 128 + forced_;
  }
  if (!failure_) {
    return static_cast<int>(stopped_ ? ExitCode::kStopped : ExitCode::kOk);
  }
  const detail::Circumstances around{
      .world_size = options_.nproc,
      .oom_kills = detail::kernel_oom_kills() - oom_kills_before_,
      .passed_on = passed_on_};
  show_on_screen(detail::verdict(
      *failure_, ranks_[failure_->rank].output.last_lines(), around));
  return detail::exit_code_of(failure_->status);
}

// What came since the last rank ended.
void LocalRun::note_late_signals() {
  signals_.close();
  if (signals_.next() != 0 && options_.was_asked != nullptr) {
    *options_.was_asked = true;
  }
}

}  // namespace

int run_local(const LocalOptions& options) {
  TS_CHECK_USAGE(options.nproc >= 1 && options.nproc <= 4096,
                 "launch: --nproc ", options.nproc,
                 " is not between 1 and 4096.");
  TS_CHECK_USAGE(!options.argv.empty(), "launch: no program to start.");
  return LocalRun(options).run();
}

}  // namespace tessera::launch

// Collectives of this library beside Open MPI's own and LibTorch's Gloo, in one
// run: call by call in turn, so that a ratio is of one moment.
//
//   mpirun -np 2 peers_bench [--max-bytes 67108864] [--seconds 0.2] [--no-gloo]
//
// Method: every rank rewrites its buffers before every call (else they would
// stay in one core's cache); a barrier; then the call, timed by every rank. The
// round trip of a cache line between ranks 0 and 1 is measured between any two
// calls, and a call counts for the state, near or far, that it began and ended
// in; one during which it changed counts for none. Of each state a row: the
// calls of the variant that has fewest, the median trip in nanoseconds, and of
// each variant the mean over the ranks of their medians, in microseconds.
// "bound": the in-place bound (half of the sum of two arrays, half of a copy,
// as all ranks measure it at once; for 2 ranks with two round trips). Above 2
// ranks, which share cores, a trip says little: one row. Several runs:
// peers_table.py.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace {

using Clock = std::chrono::steady_clock;
using tessera::comm::Communicator;
using tessera::comm::Mode;
using tessera::comm::ReduceOp;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin)
      .count();
}

struct Options {
  int64_t min_bytes = 4 << 10;
  int64_t max_bytes = 64 << 20;
  double seconds = 0.2;  // a variant and size
  bool gloo = true;
  std::string verbs = "all_reduce,all_gather,reduce_scatter,all_to_all";
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--no-gloo") {
      options.gloo = false;
      continue;
    }
    ++i;
    if (name == "--min-bytes") {
      options.min_bytes = std::stoll(value);
    } else if (name == "--max-bytes") {
      options.max_bytes = std::stoll(value);
    } else if (name == "--seconds") {
      options.seconds = std::stod(value);
    } else if (name == "--verbs") {
      options.verbs = value;
    } else {
      TS_CHECK_USAGE(false, "unknown flag ", name, ".");
    }
  }
  return options;
}

int mpi_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int mpi_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2,
                   values.end());
  return values[values.size() / 2];
}

// Nanoseconds for a cache line to go to the other rank's core and back.
class RoundTrip {
 public:
  RoundTrip() {
    void* base = nullptr;
    MPI_Win_allocate_shared(mpi_rank() == 0 ? 128 : 0, 1, MPI_INFO_NULL,
                            MPI_COMM_WORLD, &base, &window_);
    MPI_Aint bytes = 0;
    int unit = 0;
    MPI_Win_shared_query(window_, 0, &bytes, &unit, &base);
    line_ = static_cast<std::atomic<int>*>(base);
  }
  ~RoundTrip() { MPI_Win_free(&window_); }
  RoundTrip(const RoundTrip&) = delete;
  RoundTrip& operator=(const RoundTrip&) = delete;

  // The median of some bursts: an interrupt in one of them is no far core.
  double measure() {
    constexpr int kBursts = 7, kBurst = 32, kTrips = kBursts * kBurst;
    if (mpi_rank() == 0) line_->store(0);
    MPI_Barrier(MPI_COMM_WORLD);
    double ns = 0;
    if (mpi_rank() == 0) {
      std::vector<double> bursts;
      auto begin = Clock::now();
      for (int i = 0; i < kTrips; ++i) {
        line_->store(2 * i + 1);
        while (line_->load() != 2 * i + 2) {
        }
        if ((i + 1) % kBurst != 0) continue;
        bursts.push_back(us_since(begin) * 1000 / kBurst);
        begin = Clock::now();
      }
      ns = median(bursts);
    } else if (mpi_rank() == 1) {
      for (int i = 0; i < kTrips; ++i) {
        while (line_->load() != 2 * i + 1) {
        }
        line_->store(2 * i + 2);
      }
    }
    // The others sleep meanwhile, and do not spin in MPI.
    if (mpi_rank() > 1) {
      while (line_->load() != 2 * kTrips) usleep(1000);
    }
    MPI_Bcast(&ns, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    return ns;
  }

 private:
  MPI_Win window_ = MPI_WIN_NULL;
  std::atomic<int>* line_ = nullptr;
};

// Which state the cores were in, from a call's trips before and after it.
std::string state_of(double before, double after) {
  constexpr double kNearNs = 130, kFarNs = 250;
  if (mpi_size() > 2) return "any";
  if (std::max(before, after) <= kNearNs) return "near";
  return std::min(before, after) >= kFarNs ? "far" : "";
}

// A way to do one collective on this rank's buffers, and how long its calls
// took in each state.
struct Variant {
  std::string name;
  std::function<void()> rewrite;
  std::function<void()> call;
  std::map<std::string, std::vector<double>> us = {};
};

void fill(const at::Tensor& tensor) {
  std::memset(tensor.data_ptr(), 0, tensor.nbytes());
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options), size_(mpi_size()) {
    std::array<char, 64> path{};
    std::snprintf(path.data(), path.size(), "/tmp/tessera-peers-%d", getpid());
    MPI_Bcast(path.data(), path.size(), MPI_CHAR, 0, MPI_COMM_WORLD);
    path_ = path.data();
    store_ = c10::make_intrusive<c10d::FileStore>(path_, size_);
    shm_ = communicator("shm");
    if (options_.gloo) gloo_ = communicator("gloo");
  }
  ~Bench() {
    gloo_.reset();
    shm_.reset();
    MPI_Barrier(MPI_COMM_WORLD);
    if (mpi_rank() == 0) unlink(path_.c_str());
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void run() {
    if (mpi_rank() == 0) std::cout << "ranks " << size_ << '\n';
    for (const std::string verb :
         {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) {
      if (options_.verbs.find(verb) == std::string::npos) continue;
      for (int64_t bytes = options_.min_bytes; bytes <= options_.max_bytes;
           bytes *= 4) {
        row(verb, bytes);
      }
    }
  }

 private:
  std::unique_ptr<Communicator> communicator(const std::string& backend) {
    return tessera::comm::make_communicator({.backend = backend,
                                             .rank = mpi_rank(),
                                             .world_size = size_,
                                             .local_world_size = size_,
                                             .store = store_});
  }

  // What a verb reads and writes; all_reduce has `in` alone.
  struct Buffers {
    at::Tensor in, out;
    void rewrite() const {
      fill(in);
      if (out.defined()) fill(out);
    }
  };

  template <typename Empty>
  Buffers buffers(const std::string& verb, int64_t numel, Empty empty) const {
    const int64_t piece = numel / size_;
    if (verb == "all_reduce") return {empty(numel), {}};
    return {empty(verb == "all_gather" ? piece : numel),
            empty(verb == "reduce_scatter" ? piece : numel)};
  }

  static Variant ours(const std::string& name, const std::string& verb,
                      Communicator& ranks, const Buffers& buffers) {
    return {name, [buffers] { buffers.rewrite(); },
            [&world = ranks.world(), verb, buffers] {
              const auto& [in, out] = buffers;
              if (verb == "all_reduce") {
                world.all_reduce(in, ReduceOp::kSum, Mode::kBlocking);
              } else if (verb == "all_gather") {
                world.all_gather(out, in, Mode::kBlocking);
              } else if (verb == "reduce_scatter") {
                world.reduce_scatter(out, in, ReduceOp::kSum, Mode::kBlocking);
              } else {
                world.all_to_all(out, in, {}, {}, Mode::kBlocking);
              }
            }};
  }

  Variant open_mpi(const std::string& verb, int64_t numel,
                   const Buffers& buffers) const {
    const int piece = static_cast<int>(numel / size_);
    const int all = static_cast<int>(numel);
    auto* from = static_cast<float*>(buffers.in.data_ptr());
    auto* to = buffers.out.defined()
                   ? static_cast<float*>(buffers.out.data_ptr())
                   : nullptr;
    return {"mpi", [buffers] { buffers.rewrite(); },
            [=] {
              if (verb == "all_reduce") {
                MPI_Allreduce(MPI_IN_PLACE, from, all, MPI_FLOAT, MPI_SUM,
                              MPI_COMM_WORLD);
              } else if (verb == "all_gather") {
                MPI_Allgather(from, piece, MPI_FLOAT, to, piece, MPI_FLOAT,
                              MPI_COMM_WORLD);
              } else if (verb == "reduce_scatter") {
                MPI_Reduce_scatter_block(from, to, piece, MPI_FLOAT, MPI_SUM,
                                         MPI_COMM_WORLD);
              } else {
                MPI_Alltoall(from, piece, MPI_FLOAT, to, piece, MPI_FLOAT,
                             MPI_COMM_WORLD);
              }
            }};
  }

  // The sum of two arrays over half of the bytes, and a copy of half.
  static Variant bound(int64_t numel) {
    const int64_t half = numel / 2;
    const at::Tensor a = at::zeros({half}), b = at::zeros({half}),
                     c = at::zeros({half}), d = at::zeros({half});
    return {"bound", [a, b] { fill(a), fill(b); },
            [a, b, c, d, half] {
              float* to = c.data_ptr<float>();
              const float* x = a.data_ptr<float>();
              const float* y = b.data_ptr<float>();
#pragma GCC ivdep
              for (int64_t i = 0; i < half; ++i) to[i] = x[i] + y[i];
              std::memcpy(d.data_ptr(), c.data_ptr(), c.nbytes());
            }};
  }

  void row(const std::string& verb, int64_t bytes) {
    const int64_t numel = std::max<int64_t>(bytes / 4, size_);
    // Where the system puts a buffer alone moves a figure by a third: all take
    // turns on the same.
    const Buffers ordinary = buffers(
        verb, numel, [](int64_t n) { return at::empty({n}, at::kFloat); });
    const Buffers registered = buffers(
        verb, numel, [&](int64_t n) { return shm_->empty({n}, at::kFloat); });
    std::vector<Variant> variants;
    variants.push_back(ours("shm", verb, *shm_, ordinary));
    variants.push_back(ours("registered", verb, *shm_, registered));
    variants.push_back(open_mpi(verb, numel, ordinary));
    if (gloo_) variants.push_back(ours("gloo", verb, *gloo_, ordinary));
    if (verb == "all_reduce") variants.push_back(bound(numel));
    double spent = 0;
    const double budget =
        options_.seconds * 1e6 * static_cast<double>(variants.size());
    std::map<std::string, std::vector<double>> trips;
    double before = round_trip_.measure();
    for (int i = 0; i < 5000 && (i < 7 || spent < budget); ++i) {
      // Each comes first in turn: the first finds what the last one left.
      for (size_t v = 0; v < variants.size(); ++v) {
        Variant& variant = variants[(v + i) % variants.size()];
        double took = once(variant);
        spent += took;
        const double after = round_trip_.measure();
        const std::string state = state_of(before, after);
        if (variant.name == "bound" && size_ == 2) {
          took += (before + after) / 1000;
        }
        if (i >= 2 && !state.empty()) {
          variant.us[state].push_back(took);
          trips[state].push_back((before + after) / 2);
        }
        before = after;
      }
      MPI_Bcast(&spent, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    }
    for (const auto& [state, all] : trips) {
      print(verb, bytes, state, median(all), variants);
    }
  }

  double once(const Variant& variant) {
    variant.rewrite();
    const bool by_mpi = variant.name == "mpi";
    if (by_mpi) {
      MPI_Barrier(MPI_COMM_WORLD);
    } else {
      shm_->world().barrier();
    }
    const auto begin = Clock::now();
    variant.call();
    return us_since(begin);
  }

  void print(const std::string& verb, int64_t bytes, const std::string& state,
             double trip, std::vector<Variant>& variants) {
    std::vector<double> us;
    size_t calls = SIZE_MAX;
    for (Variant& variant : variants) {
      calls = std::min(calls, variant.us[state].size());
      double mine = median(variant.us[state]), sum = 0;
      MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
      us.push_back(sum / size_);
    }
    constexpr size_t kFewest = 5;
    if (mpi_rank() != 0 || calls < kFewest) return;
    std::printf("%-15s %9lld  %-4s %4zu calls  trip %4.0f ns", verb.c_str(),
                static_cast<long long>(bytes), state.c_str(), calls, trip);
    for (size_t v = 0; v < variants.size(); ++v) {
      std::printf("  %s %9.1f (%5.2f)", variants[v].name.c_str(), us[v],
                  us[v] / us[0]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const Options options_;
  const int size_;
  std::string path_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<Communicator> shm_;
  std::unique_ptr<Communicator> gloo_;
  RoundTrip round_trip_;
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  at::set_num_threads(1);
  try {
    Bench(parse(argc, argv)).run();
  } catch (const std::exception& error) {
    std::cerr << "peers_bench: " << error.what() << '\n';
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Finalize();
}

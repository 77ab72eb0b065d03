#include "tessera/comm/communicator.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "tessera/comm/algorithms/hierarchical.h"
#include "tessera/comm/algorithms/selection.h"
#include "tessera/comm/base/backend_group.h"
#include "tessera/comm/base/failure_note.h"
#include "tessera/comm/base/fingerprints.h"
#include "tessera/comm/base/histories.h"
#include "tessera/comm/base/patient_store.h"
#include "tessera/comm/base/rendezvous.h"
#include "tessera/comm/base/routed_backend.h"
#include "tessera/comm/base/sentinel.h"
#include "tessera/comm/base/staged_group.h"
#include "tessera/comm/factory/failable_communicator.h"
#include "tessera/comm/fake/fake_backend.h"
#include "tessera/comm/gloo/gloo_backend.h"
#include "tessera/comm/host_map.h"
#include "tessera/comm/mpi/mpi_backend.h"
#include "tessera/comm/nccl/gpus.h"
#include "tessera/comm/nccl/lane.h"
#include "tessera/comm/nccl/nccl_backend.h"
#include "tessera/comm/shm/shm_backend.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/host.h"
#include "tessera/core/vector_math.h"

namespace tessera::comm {
namespace {

// As each rank says through the store.
std::vector<std::string> exchange_hosts(Rendezvous rendezvous, int64_t rank,
                                        int64_t world_size,
                                        std::chrono::milliseconds timeout) {
  rendezvous.set(c10::str(rank), host_identity());
  return rendezvous.get_each("", world_size, timeout, "the host of rank");
}

// What stands before the name of the backend that goes between hosts.
constexpr std::string_view kInside = "shm+";

bool is_hierarchical(const std::string& backend) {
  return backend.starts_with(kInside);
}

constexpr std::string_view kNccl = "nccl";

// Of tensors of the CPU.
std::string resolve_backend(const CommunicatorOptions& options) {
  const bool one_host = options.local_world_size == options.world_size;
  const bool asked_for = algorithms::goes_by_hosts(options.algorithm);
  std::string across = options.backend;
  if (across == "auto" || across == kNccl) {
    if (one_host) return "shm";
    across = "gloo";
    if (options.algorithm != "auto" && !asked_for) return across;
  } else if (!asked_for || across == "shm" || across == "fake") {
    return across;
  }
  return c10::str(kInside, across);
}

void check_options(const CommunicatorOptions& options,
                   const std::string& resolved) {
  const std::string backend =
      is_hierarchical(resolved) ? resolved.substr(kInside.size()) : resolved;
  for (const BackendInfo& info : backends()) {
    if (info.name != backend) continue;
    TS_CHECK_CONFIG(info.built, "comm.backend=", backend, ": ", info.note);
    TS_CHECK_CONFIG(options.world_size >= 1 && options.rank >= 0 &&
                        options.rank < options.world_size,
                    "rank ", options.rank, " is not in a world of ",
                    options.world_size, ".");
    TS_CHECK_CONFIG(
        backend != "shm" || options.local_world_size == options.world_size,
        "comm.backend=shm serves one host, but ", options.local_world_size,
        " of ", options.world_size, " ranks are on this one. Use gloo.");
    TS_CHECK_CONFIG(
        options.store || options.world_size == 1 || backend == "fake",
        "a world of ", options.world_size,
        " ranks needs a store in which they find each other.");
    TS_CHECK_CONFIG(options.hosts.empty() ||
                        std::ssize(options.hosts) == options.world_size,
                    "hosts: ", options.hosts.size(), " are named, and ",
                    options.world_size,
                    " ranks have one each. Leave them out, and ranks say where "
                    "they are.");
    return;
  }
  TS_CHECK_CONFIG(false, "comm.backend=", backend,
                  " is not known. Use auto, shm, gloo, mpi, nccl or fake.");
}

void check_nccl(bool built, const std::string& against) {
  TS_CHECK_CONFIG(built, "comm.backend=nccl: ", nccl::note());
  TS_CHECK_CONFIG(against.empty(), "comm.backend=nccl: ", against);
}

class BackendCommunicator : public FailableCommunicator {
 public:
  explicit BackendCommunicator(const CommunicatorOptions& options)
      : options_(options),
        backend_(resolve_backend(options)),
        exceptions_(std::uncaught_exceptions()),
        name_(backend_) {
    if (options_.store) store_ = own_part_of(*options_.store);
    try {
      selection_.emplace(options.algorithm);
      if (options_.backend == kNccl) {
        check_nccl(nccl::is_built(), nccl::against_devices(options_.devices));
        // A rank that is alone goes over it too.
        if (!store_) store_ = c10::make_intrusive<c10d::HashStore>();
      }
      check_options(options_, backend_);
      connect_world();
    } catch (const std::exception& error) {
      announce(message_of(error));
      if (sentinel_) sentinel_->close(/*failed=*/true);
      throw;
    }
  }

  ~BackendCommunicator() override {
    // Unwinding: what is pending would wait for peers that cannot come.
    const bool unwinds = std::uncaught_exceptions() > exceptions_;
    if (unwinds) fail("it ended with an exception");
    while (!groups_.empty()) {
      groups_.back()->close();  // while it hears of ranks that are lost
      std::unique_ptr<BackendGroup> last;
      const std::lock_guard lock(groups_mutex_);
      last = std::move(groups_.back());
      groups_.pop_back();
    }
    // Who judges may hold it a little longer than this lives.
    if (sentinel_) sentinel_->close(unwinds);
  }

  int64_t rank() const override { return options_.rank; }
  int64_t world_size() const override { return options_.world_size; }
  const std::string& backend() const override { return name_; }
  Group& world() override { return *world_; }

  Group* make_group(const std::vector<int64_t>& ranks,
                    const std::string& name) override {
    check_ranks(ranks, name);
    if (const auto found = by_ranks_.find({ranks, name});
        found != by_ranks_.end()) {
      return found->second;
    }
    // The same on all its members, whatever groups they are in besides.
    const std::string key = c10::str(
        "group/", name, "/",
        hash64(std::as_bytes(std::span(ranks.data(), ranks.size()))), "/");
    const auto at = std::find(ranks.begin(), ranks.end(), options_.rank);
    if (at == ranks.end()) return nullptr;
    GroupInfo info{.name = name,
                   .backend = backend_of(ranks),
                   .ranks = ranks,
                   .rank = at - ranks.begin(),
                   .timeout = options_.timeout,
                   .rank_failure = rank_failure_,
                   .lost = lost_};
    if (ranks.size() > 1) info.busy = busy_;
    Connection connection = connect(info, key);
    if (connection.device != c10::kCPU) info.backend = over_nccl(info.backend);
    auto made =
        std::make_unique<StagedGroup>(info, std::move(connection), judge());
    BackendGroup* const group = made.get();
    {
      const std::lock_guard lock(groups_mutex_);
      groups_.push_back(std::move(made));
    }
    // Where a rank was lost meanwhile.
    if (const auto why = lost_->text(); !why.empty()) group->fail(why);
    by_ranks_.emplace(std::pair(ranks, name), group);
    const std::lock_guard lock(reporters_mutex_);
    reporters_.push_back(group->reporter());
    return group;
  }

  std::vector<Group*> groups() override {
    std::vector<Group*> all;
    for (const auto& group : groups_) all.push_back(group.get());
    return all;
  }

  double seconds_busy() const override { return busy_->seconds(); }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return world_->empty(sizes, dtype);
  }

  void fail(const std::string& why) override {
    fail_groups(why);
    announce(why);
  }

 private:
  void check_ranks(const std::vector<int64_t>& ranks,
                   const std::string& name) const {
    const bool ascending =
        std::adjacent_find(ranks.begin(), ranks.end(),
                           std::greater_equal<>()) == ranks.end();
    TS_CHECK(!ranks.empty() && ascending && ranks.front() >= 0 &&
                 ranks.back() < options_.world_size,
             "group '", name, "': ranks ", c10::IntArrayRef(ranks),
             " must be ascending and within the world of ", options_.world_size,
             ".");
  }

  // Communicators that are made one after the other over one store do not see
  // each other's keys: every rank makes them in the same order.
  c10::intrusive_ptr<c10d::Store> own_part_of(c10d::Store& store) const {
    const int64_t generation =
        store.add(c10::str("tessera/made-by-", options_.rank), 1);
    return c10::make_intrusive<PatientStore>(c10::str("tessera/", generation),
                                             options_.store);
  }

  RankReport report() {
    const std::lock_guard lock(reporters_mutex_);
    RankReport report{.rank = options_.rank, .groups = {}};
    for (const auto& reporter : reporters_) report.groups.push_back(reporter());
    return report;
  }

  BackendGroup::Judge judge() {
    if (!sentinel_) return {};
    // Work may outlive the communicator: then nobody judges.
    const std::weak_ptr weak(sentinel_);
    return {.verdict =
                [weak](const Question& question) {
                  const auto sentinel = weak.lock();
                  return sentinel ? sentinel->judge(question) : "";
                },
            .record =
                [weak] {
                  if (const auto sentinel = weak.lock()) sentinel->record();
                }};
  }

  void connect_world() {
    if (store_ && options_.world_size > 1) {
      SentinelOptions sentinel{
          .rank = options_.rank,
          .world_size = options_.world_size,
          .record_folder = options_.record_folder,
          .report = [this] { return report(); },
          .lost =
              [this](const std::string& why, bool store_answers) {
                lost_->note(why);
                fail_groups(why);
                if (store_answers) announce_at_store(why);
              }};
      if (backend_ != "fake") sentinel.silence = options_.silence;
      sentinel_ = std::make_shared<Sentinel>(Rendezvous(store_, "sentinel/"),
                                             std::move(sentinel));
    }
    if (store_ && options_.world_size > 1 && backend_ != "fake") meet();
    if (goes_over_nccl()) {
      watch_ = std::make_shared<nccl::Watch>(options_.timeout);
      name_ = over_nccl(backend_);
    }
    std::vector<int64_t> all(options_.world_size);
    std::iota(all.begin(), all.end(), 0);
    world_ = make_group(all, "world");
  }

  // What all ranks have to know of each other before they make groups.
  void meet() {
    selection_->agree(Rendezvous(store_, ""), options_.rank, options_.timeout);
    hosts_ = options_.hosts;
    if (is_hierarchical(backend_) && hosts_.empty()) {
      hosts_ = exchange_hosts(Rendezvous(store_, "host/"), options_.rank,
                              options_.world_size, options_.timeout);
    }
  }

  // Where it is asked for, or every rank has a GPU of its own.
  bool goes_over_nccl() const {
    const bool is_asked_for = options_.backend == kNccl;
    const bool may = options_.backend == "auto" && options_.world_size > 1 &&
                     nccl::is_built() &&
                     nccl::against_devices(options_.devices).empty();
    if (!is_asked_for && !may) return false;
    const std::string against = nccl::against_sharing(exchange_gpus());
    if (is_asked_for) check_nccl(/*built=*/true, against);
    return against.empty();
  }

  std::vector<std::string> exchange_gpus() const {
    Rendezvous rendezvous(store_, "gpu/");
    rendezvous.set(c10::str(options_.rank), nccl::gpu_of_this_thread());
    return rendezvous.get_each("", options_.world_size, options_.timeout,
                               "the GPU of rank");
  }

  static std::string over_nccl(const std::string& backend) {
    return c10::str(kNccl, "+", backend);
  }

  // The hosts of these ranks, where collectives are hierarchical.
  std::vector<std::string> hosts_of(const std::vector<int64_t>& ranks) const {
    std::vector<std::string> hosts;
    for (int64_t rank : ranks) hosts.push_back(hosts_.at(rank));
    return hosts;
  }

  // Of ranks on one host: what goes inside hosts.
  std::string backend_of(const std::vector<int64_t>& ranks) const {
    if (!is_hierarchical(backend_) || ranks.size() == 1) return backend_;
    const std::vector<std::string> hosts = hosts_of(ranks);
    const bool one_host =
        std::count(hosts.begin(), hosts.end(), hosts.front()) ==
        static_cast<int64_t>(hosts.size());
    return one_host ? "shm" : backend_;
  }

  void fail_groups(const std::string& why) {
    const std::lock_guard lock(groups_mutex_);
    for (const auto& group : groups_) group->fail(why);
  }

  // Those who wait for this rank at the store hear of its failure.
  void announce(const std::string& why) const {
    if (!store_ || (sentinel_ && sentinel_->store_is_silent())) return;
    announce_at_store(why);
  }

  void announce_at_store(const std::string& why) const {
    Rendezvous(store_, "")
        .announce_failure(c10::str("rank ", options_.rank, " failed: ", why));
  }

  Connection connect(const GroupInfo& info, const std::string& key) const {
    try {
      Connection connection = connection_of(info, key);
      bool compares_itself = connection.names_peers || info.ranks.size() == 1 ||
                             info.backend == "fake";
      if (watch_ && (info.ranks.size() > 1 || options_.world_size == 1)) {
        compares_itself = info.ranks.size() == 1;
        connection =
            make_routed(std::move(connection),
                        nccl::connect(Rendezvous(store_, key + "nccl/"),
                                      {.rank = info.rank,
                                       .ranks = info.ranks,
                                       .timeout = options_.timeout},
                                      watch_),
                        c10::kCUDA);
      }
      if (!compares_itself) compare_calls(connection, info, key);
      return connection;
    } catch (const std::exception& error) {
      announce(message_of(error));
      throw;
    }
  }

  void compare_calls(Connection& connection, const GroupInfo& info,
                     const std::string& key) const {
    if (fingerprints_are_on()) {
      const auto prints = std::make_shared<Fingerprints>(
          Rendezvous(store_, key + "prints/"), info.ranks, info.rank,
          options_.timeout);
      connection.before = [prints](const Operation& operation) {
        prints->compare(operation);
      };
      return;
    }
    const auto histories = std::make_shared<Histories>(connection.backend);
    connection.before = [histories](const Operation&) { histories->check(); };
    connection.taken = [histories](const Operation& operation) {
      histories->add(operation);
    };
    connection.compare_next = [histories] { histories->compare_next(); };
  }

  Connection connection_of(const GroupInfo& info,
                           const std::string& key) const {
    const bool alone = info.ranks.size() == 1;
    if (is_hierarchical(info.backend) && !alone) {
      return hierarchical_of(info, key);
    }
    Connection direct = direct_connection_of(info, key);
    if (info.backend == "fake" || alone) return direct;
    return selection_->apply(std::move(direct), info.backend);
  }

  Connection hierarchical_of(const GroupInfo& info,
                             const std::string& key) const {
    const HostMap map = make_host_map(hosts_of(info.ranks), info.rank);
    GroupInfo inside = info, across = info;
    inside.backend = "shm";
    inside.rank = map.local;
    inside.ranks.clear();
    for (int64_t rank : map.locals()) inside.ranks.push_back(info.ranks[rank]);
    across.backend = info.backend.substr(kInside.size());
    const std::string host = c10::str(key, "host-", map.host, "/");
    return algorithms::make_hierarchical(
        {.map = map,
         .inside = direct_connection_of(inside, host),
         .across = direct_connection_of(across, c10::str(key, "across/"))},
        selection_->chooser(across.backend, map.num_hosts()));
  }

  int64_t ranks_on_this_host() const {
    if (hosts_.empty()) return options_.local_world_size;
    return std::count(hosts_.begin(), hosts_.end(), hosts_[options_.rank]);
  }

  Connection direct_connection_of(const GroupInfo& info,
                                  const std::string& key) const {
    const auto rank = static_cast<int>(info.rank);
    const auto size = static_cast<int>(info.ranks.size());
    if (info.backend == "fake" || size == 1) {
      return {.backend = c10::make_intrusive<fake::FakeBackend>(rank, size),
              .any_device = true};
    }
    Rendezvous rendezvous(store_, key);
    if (info.backend == "gloo") {
      return gloo::make_gloo_backend(std::move(rendezvous),
                                     {.rank = rank,
                                      .size = size,
                                      .address = options_.address,
                                      .timeout = options_.timeout});
    }
    if (info.backend == "mpi") {
      return mpi::connect(std::move(rendezvous),
                          {.group = info.name,
                           .rank = info.rank,
                           .ranks = info.ranks,
                           .world_size = options_.world_size,
                           .timeout = options_.timeout});
    }
    auto shm = c10::make_intrusive<shm::ShmBackend>(
        std::move(rendezvous), shm::Place{.group = info.name,
                                          .rank = info.rank,
                                          .ranks = info.ranks,
                                          .ranks_on_host = ranks_on_this_host(),
                                          .timeout = options_.timeout});
    return {.backend = shm,
            .fail = [shm](const std::string& why) { shm->fail(why); },
            .close = [shm] { shm->close(); },
            .names_peers = true,
            .empty = shm::empty_registered};
  }

  const CommunicatorOptions options_;
  const std::string backend_;  // of tensors of the CPU
  const int exceptions_;       // in flight when it was made
  std::string name_;
  std::optional<algorithms::Selection> selection_;  // its errors are announced
  std::vector<std::string> hosts_;  // of all ranks, or empty: not needed
  c10::intrusive_ptr<c10d::Store> store_;
  std::map<std::pair<std::vector<int64_t>, std::string>, Group*> by_ranks_;
  const std::shared_ptr<BusyTime> busy_ = std::make_shared<BusyTime>();
  const std::shared_ptr<FailureNote> rank_failure_ =
      std::make_shared<FailureNote>();
  const std::shared_ptr<FailureNote> lost_ = std::make_shared<FailureNote>();
  std::shared_ptr<nccl::Watch> watch_;  // none: NCCL is not used
  std::mutex groups_mutex_;
  std::vector<std::unique_ptr<BackendGroup>> groups_;  // changed by the rank
  Group* world_ = nullptr;
  std::mutex reporters_mutex_;
  std::vector<std::function<GroupReport()>> reporters_;
  // Ends first: its thread asks the groups.
  std::shared_ptr<Sentinel> sentinel_;
};

}  // namespace

void compare_calls(Communicator& ranks) {
  for (Group* group : ranks.groups()) group->compare_calls();
}

std::unique_ptr<FailableCommunicator> make_failable_communicator(
    const CommunicatorOptions& options) {
  settle_vector_math();  // ranks may be threads of this process
  return std::make_unique<BackendCommunicator>(options);
}

std::unique_ptr<Communicator> make_communicator(
    const CommunicatorOptions& options) {
  return make_failable_communicator(options);
}

std::vector<BackendInfo> backends() {
  return {{"shm", true, "ranks of one host, over shared memory"},
          {"gloo", true, "LibTorch's, over TCP"},
          {"fake", true, "one process as any rank of any world"},
          {"mpi", mpi::is_built(), mpi::note()},
          {"nccl", nccl::is_built(), nccl::note()}};
}

}  // namespace tessera::comm

#include "tessera/monitor/memory.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <array>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "tessera/core/cgroup.h"
namespace tessera::monitor {

namespace {

namespace profiler = torch::profiler::impl;

struct Count {
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t bytes) {
    const int64_t sum = now += bytes;
    int64_t most = peak;
    while (sum > most && !peak.compare_exchange_weak(most, sum)) {
    }
  }
  void reset_peak() { peak = now.load(); }
  TensorBytes bytes() const { return {now, peak}; }
};

}  // namespace

struct Account {
  Count all;
  std::array<Count, kNumMemoryKinds> kinds;

  Count& of(MemoryKind kind) { return kinds[static_cast<size_t>(kind)]; }
  void add(int64_t bytes, MemoryKind kind) {
    all.add(bytes);
    of(kind).add(bytes);
  }
  void reset_peaks() {
    all.reset_peak();
    for (Count& kind : kinds) kind.reset_peak();
  }
};

namespace {

Account process;
thread_local Account* own = nullptr;  // of the rank that this thread is

// In front of every block: what a free must give back, and to whom. 64 bytes
// keep the alignment of LibTorch's allocator.
struct alignas(64) Header {
  int64_t bytes;
  Account* account;  // nullptr: the process's alone
  MemoryKind kind;
};
static_assert(sizeof(Header) == 64);

void book(const Header& header) {
  process.add(header.bytes, header.kind);
  if (header.account != nullptr) header.account->add(header.bytes, header.kind);
}

void unbook(const Header& header) {
  process.add(-header.bytes, header.kind);
  if (header.account != nullptr) {
    header.account->add(-header.bytes, header.kind);
  }
}

// Of memory that lies elsewhere: registered tensors.
constexpr MemoryCounter kElsewhere = {
    .take = [](int64_t bytes, MemoryKind kind) -> void* {
      auto receipt = std::make_unique<Header>(bytes, own, kind);
      book(*receipt);
      return receipt.release();
    },
    .give_back =
        [](void* receipt) {
          const std::unique_ptr<Header> header(static_cast<Header*>(receipt));
          unbook(*header);
        }};

class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::kCPU);
    if (n == 0) return {nullptr, nullptr, &release, cpu};
    TORCH_CHECK(n <= std::numeric_limits<int64_t>::max() - sizeof(Header),
                "a tensor of ", n, " bytes");
    auto* header = new (base_->raw_allocate(n + sizeof(Header)))
        Header{static_cast<int64_t>(n), own, memory_kind()};
    book(*header);
    // oneDNN's scratch demands that the context be the data itself.
    void* data = header + 1;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    base_->copy_data(to, from, n);
  }

  static CountingAllocator& instance() {
    static auto* instance = new CountingAllocator;  // outlives every tensor
    return *instance;
  }

 private:
  static void release(void* data) {
    if (data == nullptr) return;
    Header* header = static_cast<Header*>(data) - 1;
    unbook(*header);
    instance().base_->raw_deallocate(header);
  }

  c10::Allocator* base_ = c10::GetDefaultCPUAllocator();
};

// Blocks of devices, which are told by address. One that a thread without
// DeviceMemory let go of is found out when its address is given again.
class DeviceBlocks : public profiler::ProfilerStateBase {
 public:
  // LibTorch takes who listens for its profiler: this is one that is off.
  DeviceBlocks()
      : ProfilerStateBase(
            profiler::ProfilerConfig(profiler::ProfilerState::Disabled)) {}
  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void* block, int64_t bytes, size_t /*allocated*/,
                         size_t /*reserved*/, c10::Device device) override {
    if (device.is_cpu()) return;
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find({device.index(), block});
    if (found != blocks_.end()) {
      unbook(found->second);
      blocks_.erase(found);
    }
    if (bytes <= 0) return;
    const Header header{bytes, own, memory_kind()};
    book(header);
    blocks_.emplace(std::pair(device.index(), block), header);
  }

  static const std::shared_ptr<DeviceBlocks>& instance() {
    static auto* const instance =
        new std::shared_ptr(std::make_shared<DeviceBlocks>());  // for good
    return *instance;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, void*>, Header> blocks_;
};

// Accounts are never freed (a tensor may outlive its rank), but used again.
class Accounts {
 public:
  Account* take() {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < free_.size(); ++i) {
      if (free_[i]->all.now != 0) continue;  // tensors of the last user live on
      Account* account = free_[i];
      free_.erase(free_.begin() + static_cast<int64_t>(i));
      account->reset_peaks();
      return account;
    }
    return new Account;
  }
  void give_back(Account* account) {
    std::lock_guard lock(mutex_);
    free_.push_back(account);
  }

  static Accounts& instance() {
    static auto* instance = new Accounts;
    return *instance;
  }

 private:
  std::mutex mutex_;
  std::vector<Account*> free_;
};

Account& account() { return own != nullptr ? *own : process; }

// The number after `name` in a file of the kernel's, -1 where there is none.
int64_t read_number(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = -1;
  while (!name.empty() && file >> word && word != name) {
  }
  return file >> value ? value : -1;
}

// The least of this process's control groups; -1: none.
int64_t cgroup_limit() {
  int64_t least = -1;
  for (const std::string& file :
       cgroup_files("memory", "memory.max", "memory.limit_in_bytes")) {
    const int64_t bytes = read_number(file, "");
    if (bytes > 0 && (least < 0 || bytes < least)) least = bytes;
  }
  return least;
}

}  // namespace

void count_tensor_bytes() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::SetCPUAllocator(&CountingAllocator::instance(), /*priority=*/1);
    memory_counter = &kElsewhere;
  });
}

TensorBytes tensor_bytes() { return account().all.bytes(); }

TensorBytes tensor_bytes(MemoryKind kind) { return account().of(kind).bytes(); }

void reset_tensor_peak() { account().reset_peaks(); }

RankMemory::RankMemory() : before_(own) { own = Accounts::instance().take(); }

RankMemory::~RankMemory() {
  Accounts::instance().give_back(own);
  own = before_;
}

DeviceMemory::DeviceMemory()
    : listens_(c10::DebugInfoKind::PROFILER_STATE, DeviceBlocks::instance()) {}

int64_t host_memory_bytes() {
  const int64_t kib = read_number("/proc/meminfo", "MemTotal:");
  const int64_t total = kib < 0 ? 0 : kib * 1024;
  const int64_t limit = cgroup_limit();
  return limit > 0 && (total == 0 || limit < total) ? limit : total;
}

}  // namespace tessera::monitor

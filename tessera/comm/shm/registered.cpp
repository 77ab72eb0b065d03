#include "tessera/comm/shm/registered.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "tessera/comm/shm/memory_file.h"
#include "tessera/core/error.h"
#include "tessera/core/memory_kind.h"

namespace tessera::comm::shm {
namespace {

constexpr size_t kRegionBytes = 64 << 20;  // at least

size_t align_up(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// One memory file. Its first page says which one it is.
class Region {
 public:
  Region(size_t bytes, size_t asked)
      : nonce_(random_nonce()),
        file_(make_memory_file(
            "registered", bytes,
            c10::str("allocate a registered tensor of ", asked, " bytes"))) {
    TS_CHECK(mapping_.map(file_.get(), bytes), "cannot map ", bytes,
             " bytes of registered memory: ", std::strerror(errno),
             ". Raise the limit on address space (ulimit -v), or start fewer "
             "ranks here.");
    *reinterpret_cast<uint64_t*>(mapping_.base()) = nonce_;
    free_.emplace(kAlignment, bytes - kAlignment);
  }

  char* take(size_t bytes, int64_t asked) {
    const auto fits =
        std::find_if(free_.begin(), free_.end(),
                     [&](const auto& range) { return range.second >= bytes; });
    if (fits == free_.end()) return nullptr;
    const auto [offset, room] = *fits;
    free_.erase(fits);
    if (room > bytes) free_.emplace(offset + bytes, room - bytes);
    taken_.emplace(offset, Taken{bytes, take_memory_receipt(asked)});
    return mapping_.base() + offset;
  }

  void give_back(const char* data) {
    const auto taken = taken_.find(offset_of(data));
    TORCH_INTERNAL_ASSERT(taken != taken_.end(), "not allocated here");
    give_back_memory_receipt(taken->second.receipt);
    const auto at = free_.emplace(taken->first, taken->second.bytes).first;
    taken_.erase(taken);
    join_with_next(at);
    if (at != free_.begin()) join_with_next(std::prev(at));
  }

  bool holds(const char* data) const {
    return data >= mapping_.base() && data < mapping_.base() + mapping_.bytes();
  }

  Location location_of(const char* data) const {
    return {.region = nonce_,
            .region_bytes = mapping_.bytes(),
            .offset = offset_of(data),
            .fd = file_.get()};
  }

 private:
  size_t offset_of(const char* data) const {
    return static_cast<size_t>(data - mapping_.base());
  }

  void join_with_next(std::map<size_t, size_t>::iterator range) {
    const auto next = std::next(range);
    if (next == free_.end() || range->first + range->second != next->first) {
      return;
    }
    range->second += next->second;
    free_.erase(next);
  }

  const uint64_t nonce_;
  const Fd file_;
  Mapping mapping_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  struct Taken {
    size_t bytes;
    void* receipt;
  };
  std::map<size_t, Taken> taken_;  // by offset
};

// All regions of this process. A forked child begins with none: its parent's
// are shared with the parent, and not its own.
class Arena {
 public:
  void* allocate(size_t asked) {
    const size_t bytes = align_up(std::max<size_t>(asked, 1));
    const auto wanted = static_cast<int64_t>(asked);
    std::lock_guard lock(mutex_);
    leave_parent();
    for (const auto& region : regions_) {
      if (char* data = region->take(bytes, wanted)) return data;
    }
    regions_.push_back(std::make_unique<Region>(
        std::max(kRegionBytes, bytes + kAlignment), asked));
    return regions_.back()->take(bytes, wanted);
  }

  void release(const void* data) {
    std::lock_guard lock(mutex_);
    if (Region* region = region_of(data)) {
      region->give_back(static_cast<const char*>(data));
    }
  }

  std::optional<Location> locate(const void* data) {
    std::lock_guard lock(mutex_);
    leave_parent();
    const Region* region = region_of(data);
    if (region == nullptr) return std::nullopt;
    return region->location_of(static_cast<const char*>(data));
  }

 private:
  Region* region_of(const void* data) const {
    for (const auto& region : regions_) {
      if (region->holds(static_cast<const char*>(data))) return region.get();
    }
    return nullptr;
  }

  void leave_parent() {
    if (owner_ == getpid()) return;
    // Kept: tensors of the parent's may be in use here.
    for (auto& region : regions_) of_parent_.push_back(std::move(region));
    regions_.clear();
    owner_ = getpid();
  }

  std::mutex mutex_;
  pid_t owner_ = getpid();
  std::vector<std::unique_ptr<Region>> regions_;
  std::vector<std::unique_ptr<Region>> of_parent_;
};

// Never destroyed: tensors may outlive every other static object.
Arena& arena() {
  static auto* const kArena = new Arena;
  return *kArena;
}

class RegisteredAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = arena().allocate(bytes);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) { arena().release(data); }
};

}  // namespace

at::Tensor empty_registered(at::IntArrayRef sizes, at::ScalarType dtype) {
  static RegisteredAllocator allocator;
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

std::optional<Location> locate(const void* data) {
  return arena().locate(data);
}

char* PeerRegions::address_of(pid_t pid, const Location& location,
                              const std::string& owner) {
  auto& mapping = mapped_[{pid, location.region}];
  if (!mapping) {
    auto mapped = std::make_unique<Mapping>();
    map_file_of(pid, location.fd, location.region_bytes, owner, *mapped);
    const uint64_t nonce = *reinterpret_cast<const uint64_t*>(mapped->base());
    TS_CHECK_REACH(nonce == location.region, "file ", location.fd,
                   " of process ", pid, " is not the memory that ", owner,
                   " registered.");
    mapping = std::move(mapped);
  }
  return mapping->base() + location.offset;
}

}  // namespace tessera::comm::shm

#include "tessera/comm/shm/segment.h"

#include <c10/core/ScalarType.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <sstream>

#include "tessera/core/error.h"

namespace tessera::comm::shm {
namespace {

constexpr uint64_t kMagic = 0x31304d4853535354;  // "TSSSHM01"
constexpr const char* kSegmentKey = "segment";

struct alignas(64) Header {
  uint64_t magic;
  uint64_t nonce;  // also in the store: the file opened is the file meant
  Word attached;
  alignas(64) std::atomic<uint32_t> failures;
};

size_t align_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Where each part lies, for a group of `size` ranks.
struct Offsets {
  explicit Offsets(size_t size) {
    lanes = sizeof(Header);
    splits = lanes + size * sizeof(Lane);
    channels = align_up(splits + size * 2 * 2 * size * sizeof(int64_t), 4096);
    stages = align_up(channels + size * size * sizeof(Channel), 4096);
    end = stages + size * 2 * kStageBytes;
  }
  size_t lanes, splits, channels, stages, end;
};

constexpr const char* kOneHost =
    "The ranks of one host share the user and the PID namespace; otherwise use "
    "comm.backend=gloo.";

Header& header_of(const Mapping& mapping) {
  return *reinterpret_cast<Header*>(mapping.base());
}

uint64_t random_nonce() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

void copy_text(decltype(Lane::why)& to, const std::string& text) {
  const size_t count = std::min(text.size(), to.size() - 1);
  std::memcpy(to.data(), text.data(), count);
  to[count] = '\0';
}

}  // namespace

int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

std::string Call::describe() const {
  std::ostringstream text;
  text << name_of(verb);
  if (reduces(verb)) text << '(' << name_of(op) << ')';
  text << " #" << sequence;
  if (verb == Verb::kBarrier) return text.str();
  text << " of ";
  if (verb != Verb::kAllToAll) text << numel << ' ';
  text << c10::getDtypeNames(dtype).first;
  if (verb == Verb::kBroadcast) text << " from group rank " << root;
  return text.str();
}

void PackedCall::store(const Call& call) {
  words[0].store(call.sequence, std::memory_order_relaxed);
  words[1].store(static_cast<uint64_t>(call.numel), std::memory_order_relaxed);
  words[2].store(static_cast<uint64_t>(call.verb) |
                     static_cast<uint64_t>(call.op) << 8 |
                     static_cast<uint64_t>(call.dtype) << 16 |
                     static_cast<uint64_t>(call.root + 1) << 32,
                 std::memory_order_relaxed);
}

Call PackedCall::load() const {
  const uint64_t packed = words[2].load(std::memory_order_relaxed);
  return {
      .sequence = words[0].load(std::memory_order_relaxed),
      .verb = static_cast<Verb>(packed & 0xff),
      .op = static_cast<ReduceOp>(packed >> 8 & 0xff),
      .dtype = static_cast<at::ScalarType>(packed >> 16 & 0xff),
      .root = static_cast<int64_t>(packed >> 32) - 1,
      .numel = static_cast<int64_t>(words[1].load(std::memory_order_relaxed))};
}

void Descriptor::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

void Mapping::map(int fd, size_t bytes) {
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TS_CHECK(address != MAP_FAILED, "cannot map ", bytes,
           " bytes of shared memory: ", std::strerror(errno));
  base_ = static_cast<char*>(address);
  bytes_ = bytes;
}

Segment::Segment(Rendezvous rendezvous, Place place)
    : place_(std::move(place)) {
  if (place_.rank == 0) {
    create(rendezvous);
  } else {
    attach(rendezvous);
  }
  own_lane().pid = getpid();
  own_lane().since_ns = monotonic_ns();
  own_lane().state = static_cast<uint32_t>(State::kPresent);
  ring(header_of(mapping_).attached);
  wait_for_all(rendezvous);
  file_.reset();
  open_pidfds();
}

Segment::~Segment() {
  auto expected = static_cast<uint32_t>(State::kPresent);
  own_lane().state.compare_exchange_strong(
      expected, static_cast<uint32_t>(State::kClosed));
  wake_peers();
}

void Segment::create(Rendezvous& rendezvous) {
  const std::string name = "tessera-" + place_.group;
  file_.reset(memfd_create(name.substr(0, 200).c_str(),
                           MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TS_CHECK(file_.get() >= 0, "memfd_create failed: ", std::strerror(errno));
  const size_t bytes = Offsets(place_.ranks.size()).end;
  const bool shaped = fchmod(file_.get(), 0600) == 0 &&
                      ftruncate(file_.get(), static_cast<off_t>(bytes)) == 0 &&
                      fcntl(file_.get(), F_ADD_SEALS,
                            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  TS_CHECK(shaped, "cannot make ", bytes, " bytes of shared memory for group '",
           place_.group, "': ", std::strerror(errno));
  map();
  Header& header = header_of(mapping_);
  header.magic = kMagic;
  header.nonce = random_nonce();
  rendezvous.set(kSegmentKey, c10::str("/proc/", getpid(), "/fd/", file_.get(),
                                       " ", header.nonce));
}

void Segment::attach(Rendezvous& rendezvous) {
  std::istringstream text(rendezvous.get(
      kSegmentKey, place_.timeout,
      c10::str("rank ", place_.ranks[0],
               " to make the shared memory of group '", place_.group, "'")));
  std::string path;
  uint64_t nonce = 0;
  text >> path >> nonce;
  file_.reset(open(path.c_str(), O_RDWR | O_CLOEXEC));
  TS_CHECK_REACH(file_.get() >= 0, "cannot open the shared memory of rank ",
                 place_.ranks[0], " (", path, "): ", std::strerror(errno), ". ",
                 kOneHost);
  struct stat info{};
  const size_t expected = Offsets(place_.ranks.size()).end;
  TS_CHECK_REACH(fstat(file_.get(), &info) == 0 &&
                     static_cast<size_t>(info.st_size) == expected,
                 path, " holds ", info.st_size, " bytes, not the ", expected,
                 " of group '", place_.group, "'. ", kOneHost);
  map();
  const Header& header = header_of(mapping_);
  TS_CHECK_REACH(header.magic == kMagic && header.nonce == nonce, path,
                 " is not the shared memory of rank ", place_.ranks[0], ". ",
                 kOneHost);
}

void Segment::map() {
  const Offsets offsets(place_.ranks.size());
  mapping_.map(file_.get(), offsets.end);
  lanes_ = reinterpret_cast<Lane*>(mapping_.base() + offsets.lanes);
  splits_ = mapping_.base() + offsets.splits;
  channels_ = mapping_.base() + offsets.channels;
  stages_ = mapping_.base() + offsets.stages;
}

void Segment::wait_for_all(Rendezvous& rendezvous) {
  Word& attached = header_of(mapping_).attached;
  const auto end = std::chrono::steady_clock::now() + place_.timeout;
  const auto count = static_cast<uint32_t>(place_.size());
  const auto ready = [&] { return attached.value.load() >= count; };
  wait_until(attached, 0, ready, [&] {
    rendezvous.check_no_failure();
    TS_CHECK_REACH(std::chrono::steady_clock::now() < end, "group '",
                   place_.group, "': no sign of rank(s) ", absent_ranks(),
                   " within ", place_.timeout.count(), " ms.");
  });
}

std::string Segment::absent_ranks() const {
  std::string absent;
  for (int64_t r = 0; r < place_.size(); ++r) {
    if (lane(r).state != static_cast<uint32_t>(State::kAbsent)) continue;
    absent += c10::str(absent.empty() ? "" : ", ", place_.ranks[r]);
  }
  return absent;
}

void Segment::open_pidfds() {
  for (int64_t r = 0; r < place_.size(); ++r) {
    const int32_t pid = lane(r).pid;
    // -1 where the kernel has no pidfd: then the time-out alone finds a death.
    pidfds_.emplace_back(
        pid == getpid() ? -1
                        : static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  }
}

char* Segment::stage(int64_t rank, int half) const {
  return stages_ + (rank * 2 + half) * kStageBytes;
}

std::atomic<int64_t>* Segment::splits(int64_t rank, int parity) const {
  return reinterpret_cast<std::atomic<int64_t>*>(splits_) +
         (rank * 2 + parity) * 2 * place_.size();
}

Channel& Segment::channel(int64_t from, int64_t to) const {
  return reinterpret_cast<Channel*>(channels_)[from * place_.size() + to];
}

void Segment::fail(const std::string& why) {
  std::lock_guard lock(failing_);
  if (own_lane().state == static_cast<uint32_t>(State::kFailed)) return;
  copy_text(own_lane().why, why);
  own_lane().state = static_cast<uint32_t>(State::kFailed);
  header_of(mapping_).failures.fetch_add(1);
  wake_peers();
}

void Segment::wake_peers() {
  for (int64_t r = 0; r < place_.size(); ++r) {
    wake_all(lane(r).arrival);
    wake_all(lane(r).bell);
  }
}

bool Segment::has_failure() const {
  return header_of(mapping_).failures.load(std::memory_order_acquire) != 0;
}

std::optional<std::string> Segment::failure() const {
  if (!has_failure()) return std::nullopt;
  for (int64_t r = 0; r < place_.size(); ++r) {
    if (lane(r).state != static_cast<uint32_t>(State::kFailed)) continue;
    return c10::str("rank ", place_.ranks[r], " failed: ", lane(r).why.data());
  }
  return std::nullopt;
}

std::optional<std::string> Segment::loss_of(int64_t rank) const {
  if (lane(rank).state == static_cast<uint32_t>(State::kClosed)) {
    return c10::str("rank ", place_.ranks[rank], " has left the group");
  }
  pollfd death{pidfds_[rank].get(), POLLIN, 0};
  if (death.fd < 0 || poll(&death, 1, 0) <= 0) return std::nullopt;
  return c10::str("rank ", place_.ranks[rank], " (pid ", lane(rank).pid,
                  ") has died");
}

std::string Segment::last_call_of(int64_t rank) const {
  const Lane& lane = this->lane(rank);
  if (lane.begun == 0) return "has called nothing yet";
  const double ago = 1e-9 * static_cast<double>(monotonic_ns() - lane.since_ns);
  const Call call = lane.calls[lane.arrival.value % 2].load();
  return lane.begun == lane.finished
             ? c10::str("last did ", call.describe(), ", ", ago, " s ago")
             : c10::str("is in ", call.describe(), ", for ", ago, " s");
}

}  // namespace tessera::comm::shm

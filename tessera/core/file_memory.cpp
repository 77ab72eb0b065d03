#include "tessera/core/file_memory.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/fd.h"
#include "tessera/core/files.h"
#include "tessera/core/memory_kind.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

constexpr int64_t kAlignment = 64;  // as LibTorch's allocator has it

// Of Linux 5.14; headers may be older than the kernel.
constexpr int kPopulateRead = 22, kPopulateWrite = 23;

int64_t page_size() {
  static const int64_t size = ::sysconf(_SC_PAGESIZE);
  return size;
}

int64_t rounded_up(int64_t bytes, int64_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace

// A stretch of addresses, as much as the disk could hold; the file takes their
// place as it grows, and so is one mapping.
struct FileMemory::File {
  Fd fd;
  char* base = nullptr;
  int64_t reserved = 0, size = 0;
  // The pages that are wholly in it: its neighbours may live on.
  void give_back(int64_t begin, int64_t end) const {
    begin = rounded_up(begin, page_size());
    end = end / page_size() * page_size();
    if (begin < end) {
      ::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin,
                  end - begin);
    }
  }
  ~File() {
    if (base != nullptr) ::munmap(base, reserved);
  }
};

FileMemory::FileMemory(std::string folder, std::string way_out)
    : folder_(std::move(folder)),
      way_out_(std::move(way_out)),
      file_(std::make_shared<File>()) {
  TS_CHECK_IO(!lies_in_memory(folder_), folder_,
              " is on a file system that lies in memory: what is kept there "
              "would not leave it. ",
              way_out_);
  std::string path = folder_ + "/.states.XXXXXX";
  file_->fd.reset(::mkostemp(path.data(), O_CLOEXEC));
  TS_CHECK_IO(file_->fd.open(), folder_,
              ": no file can be made in it: ", std::strerror(errno), ". ",
              way_out_);
  ::unlink(path.c_str());
  // Addresses alone, which nothing takes a second time: the disk's bytes, of
  // what is moved inside of the file twice, and what may become free. Of large
  // disks no more than a rank keeps: a process, with ranks, has 128 TiB.
  constexpr int64_t kBeside = int64_t{1} << 30;
  constexpr uint64_t kMost = uint64_t{1} << 40;
  const auto room = static_cast<int64_t>(std::min(free_bytes(folder_), kMost));
  file_->reserved = rounded_up(2 * room + kBeside, page_size());
  void* const base =
      ::mmap(nullptr, file_->reserved, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, /*fd=*/-1, 0);
  TS_CHECK_IO(base != MAP_FAILED, folder_, ": no ", bytes_text(file_->reserved),
              " of addresses can be had: ", std::strerror(errno),
              ". Raise the limit of virtual memory (ulimit -v).");
  file_->base = static_cast<char*>(base);
}

FileMemory::~FileMemory() {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
    jobs_.clear();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (auto& [id, part] : parts_) give_back_memory_receipt(part.receipt);
}

void FileMemory::grow(int64_t end) {
  File& file = *file_;
  const int64_t more = rounded_up(end, page_size()) - file.size;
  if (more <= 0) return;
  const auto why_beyond = [&] {
    return std::cmp_less(free_bytes(folder_), more) ? ENOSPC : EFBIG;
  };
  const int failed = file.size + more > file.reserved
                         ? why_beyond()
                         : ::posix_fallocate(file.fd.get(), file.size, more);
  TS_CHECK_IO(failed == 0, folder_, ": states that are kept in files need ",
              bytes_text(more), " more than ", bytes_text(file.size), ", and ",
              bytes_text(free_bytes(folder_)),
              " are free: ", std::strerror(failed), ". ", way_out_);
  void* const mapped =
      ::mmap(file.base + file.size, more, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED, file.fd.get(), file.size);
  TS_CHECK_IO(mapped != MAP_FAILED, folder_,
              ": cannot be mapped: ", std::strerror(errno), ". ", way_out_);
  file.size += more;
}

at::Tensor FileMemory::zeros(int64_t part, at::IntArrayRef sizes,
                             at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(type);
  const int64_t bytes = c10::multiply_integers(sizes) *
                        static_cast<int64_t>(c10::elementSize(type));
  if (bytes == 0) return at::empty(sizes, options);
  const bool goes_on = part == last_part_;
  const int64_t begin = rounded_up(end_, goes_on ? kAlignment : page_size());
  grow(begin + bytes);
  auto& ranges = parts_[part].ranges;
  if (goes_on) {
    ranges.back().end = begin + bytes;
  } else {
    ranges.push_back({begin, begin + bytes});
  }
  last_part_ = part;
  end_ = begin + bytes;
  return at::from_blob(
      file_->base + begin, sizes,
      [file = file_, begin, bytes](void*) {
        file->give_back(begin, begin + bytes);
      },
      options);
}

void FileMemory::fetch(int64_t id, Use use) {
  const auto found = parts_.find(id);
  if (found == parts_.end()) return;
  Part& part = found->second;
  TORCH_INTERNAL_ASSERT(part.fetched < 0, "part ", id, " is fetched already");
  part.use = use;
  part.fetched = submit(use == Use::kRead ? Job::kRead : Job::kWrite, part);
  int64_t bytes = 0;
  for (const Range& range : part.ranges) bytes += range.end - range.begin;
  const MemoryScope scope(MemoryKind::kMapped);
  part.receipt = take_memory_receipt(bytes);
}

void FileMemory::note_written(int64_t id) {
  const auto found = parts_.find(id);
  if (found != parts_.end()) found->second.use = Use::kWrite;
}

void FileMemory::await(int64_t id) {
  const auto found = parts_.find(id);
  if (found != parts_.end() && found->second.fetched >= 0) {
    wait(found->second.fetched);
  }
}

void FileMemory::release(int64_t id) {
  const auto found = parts_.find(id);
  if (found == parts_.end() || found->second.fetched < 0) return;
  Part& part = found->second;
  submit(part.use == Use::kRead ? Job::kRelease : Job::kReleaseWritten, part);
  part.fetched = -1;
  give_back_memory_receipt(std::exchange(part.receipt, nullptr));
}

void FileMemory::await_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ == submitted_; });
  if (error_) std::rethrow_exception(error_);
}

void FileMemory::release_all() {
  int64_t last = -1;
  for (const auto& [id, part] : parts_) {
    last = submit(Job::kReleaseWritten, part);
  }
  if (last >= 0) wait(last);
}

int64_t FileMemory::submit(Job job, const Part& part) {
  int64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    jobs_.emplace_back(job, part.ranges);
    number = submitted_++;
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
  return number;
}

void FileMemory::wait(int64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ > number; });
  if (error_) std::rethrow_exception(error_);
}

void FileMemory::loop() {
  constexpr int kLowPriority = 10;
  ::setpriority(PRIO_PROCESS, /*who=*/0, kLowPriority);  // of this thread
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !jobs_.empty(); });
    if (closing_) return;
    const auto [job, ranges] = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      run(job, ranges);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    ++done_;
    changed_.notify_all();
  }
}

// Pages of a shared mapping are lost by neither call that takes them away: what
// could not be written stays.
void FileMemory::run(Job job, const std::vector<Range>& ranges) const {
  const auto require = [&](bool done, const char* what) {
    TS_CHECK_IO(done, folder_, ": states cannot be ", what, ": ",
                std::strerror(errno), ". ", way_out_);
  };
  for (const Range& range : ranges) {
    char* const begin = file_->base + range.begin;
    const int64_t bytes =
        rounded_up(range.end, page_size()) - range.begin;  // begins a page
    if (job == Job::kRead || job == Job::kWrite) {
      ::madvise(begin, bytes, MADV_WILLNEED);
      const int populate = job == Job::kRead ? kPopulateRead : kPopulateWrite;
      const bool done = ::madvise(begin, bytes, populate) == 0;
      // An older kernel, or one that a signal stops, reads what is touched.
      require(done || errno == EINVAL || errno == EINTR, "read");
      continue;
    }
    if (job == Job::kReleaseWritten) {
      require(::msync(begin, bytes, MS_SYNC) == 0, "written");
    }
    require(::madvise(begin, bytes, MADV_DONTNEED) == 0, "released");
    ::posix_fadvise(file_->fd.get(), range.begin, bytes, POSIX_FADV_DONTNEED);
  }
}

int64_t FileMemory::bytes() const { return file_->size; }

int64_t FileMemory::resident_bytes() const {
  if (file_->size == 0) return 0;
  std::vector<unsigned char> pages(file_->size / page_size());
  TORCH_INTERNAL_ASSERT(::mincore(file_->base, file_->size, pages.data()) == 0);
  return page_size() * std::ranges::count_if(pages, [](unsigned char page) {
           return (page & 1) != 0;
         });
}

}  // namespace tessera

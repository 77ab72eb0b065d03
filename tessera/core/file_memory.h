// Memory that lies in a file, and in the host's memory only while it is used.
//
// A tensor made here has its place in a file of its own disk space, mapped, in
// a part: what is fetched and released as one. It may be read and written at
// any time: what is not there is read when it is touched, and the system takes
// pages away where memory is short. fetch() reads ahead of that; release()
// writes back and takes the pages away.
//
// File:    one, of 0 bytes at first and without a name: it ends with the
//          process, or with the last of its tensors. All of a tensor's bytes
//          are reserved on the disk when it is made, and given back with it,
//          but for pages that it shares with others.
// Order:   one helper thread of low priority fetches and releases, in the order
//          of the calls: what is fetched behind a release is read when that is
//          done. So of parts that are used one after the other, each fetched
//          before the one before it is used, two are in memory.
// Counted: while fetched, as memory of kMapped (memory_kind.h).
// Errors:  TS_CHECK_IO: a folder that cannot be written to or lies in memory, a
//          disk that is full, with the bytes needed and free. What fails in the
//          thread, of any part: from await(), await_all() and release_all(),
//          from then on.
// Threads: one at a time calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace tessera {

class FileMemory {
 public:
  enum class Use { kRead, kWrite };

  // `way_out`: what helps where the folder does not: "Set ... to ...".
  FileMemory(std::string folder, std::string way_out);
  ~FileMemory();
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;

  // Contiguous, on the CPU. A part lies together where its tensors are made one
  // after the other.
  at::Tensor zeros(int64_t part, at::IntArrayRef sizes, at::ScalarType type);

  // Begins to read a part; what it is fetched for may write to it.
  void fetch(int64_t part, Use use);
  // It is written to, whatever it was fetched for.
  void note_written(int64_t part);
  // Until it is there. Nothing where it was not fetched.
  void await(int64_t part);
  // Begins to write back what was written, and to take the pages away. Nothing
  // where it was not fetched.
  void release(int64_t part);
  // Every part, also what was touched without a fetch; until it is done.
  void release_all();
  // Until all that was begun is done.
  void await_all();

  // Of the file: of all tensors there ever were at once, with gaps; and of what
  // is in memory now, as the system says.
  int64_t bytes() const;
  int64_t resident_bytes() const;

 private:
  struct File;
  struct Range {
    int64_t begin, end;  // bytes of the file
  };
  enum class Job { kRead, kWrite, kRelease, kReleaseWritten };
  struct Part {
    std::vector<Range> ranges;
    int64_t fetched = -1;  // the number of its fetch; -1: none
    Use use = Use::kRead;
    void* receipt = nullptr;
  };
  void grow(int64_t end);
  int64_t submit(Job job, const Part& part);
  void wait(int64_t number);
  void loop();
  void run(Job job, const std::vector<Range>& ranges) const;

  const std::string folder_, way_out_;
  std::shared_ptr<File> file_;
  std::map<int64_t, Part> parts_;
  std::optional<int64_t> last_part_;
  int64_t end_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Job, std::vector<Range>>> jobs_;
  int64_t submitted_ = 0, done_ = 0;  // jobs, in order
  std::exception_ptr error_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace tessera

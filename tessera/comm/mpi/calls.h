// The calls of MPI that the backend makes, without MPI's own header.
//
// Every call is non-blocking: it posts what it has to and notes its requests;
// Requests::test() says whether they are done. Counts of any size: MPI's are
// ints, so bytes beyond that travel as one larger datatype, and reductions in
// pieces, alike on every rank.
// Sums:    fp64, fp32 and integers, in the order that MPI chooses; NaN wins in
//          min and max, as on shm. Half precision: see mpi_backend.cpp.
// Errors:  c10::DistBackendError with the call and MPI's words; a message of
//          another size than its receive is named with both.
// Threads: one, the progress thread, for everything here.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm::mpi {

// Bytes to or from one rank of a group.
struct Piece {
  char* data = nullptr;
  int64_t bytes = 0;
  int64_t peer = 0;
};
inline constexpr int64_t kAnySource = -1;

// What one operation has posted.
class Requests {
 public:
  Requests();
  ~Requests();
  Requests(Requests&&) noexcept;
  Requests& operator=(Requests&&) noexcept;

  // Whether all are done; throws what one failed with.
  bool test();
  // Of the receive that was tested last.
  int64_t source() const;

 private:
  friend class Comm;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The communicators of one group.
class Comm {
 public:
  // Blocks until all of `ranks` (of the world, ascending) have called it with
  // this `name`. `largest_count`: of one call; tests make it small.
  Comm(const std::vector<int64_t>& ranks, uint64_t name, int64_t largest_count);
  // REQUIRES: nothing is pending.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // `numel` elements; the mean is left to the caller.
  void all_reduce(void* data, int64_t numel, at::ScalarType dtype, ReduceOp op,
                  Requests& requests);
  // output: `numel`, input: `numel` for each rank; they do not overlap.
  void reduce_scatter(void* output, const void* input, int64_t numel,
                      at::ScalarType dtype, ReduceOp op, Requests& requests);
  // input: `bytes`, or null where they are in their place in output already.
  void all_gather(void* output, const void* input, int64_t bytes,
                  Requests& requests);
  void broadcast(void* data, int64_t bytes, int64_t root, Requests& requests);
  // To and from many ranks at once. Among the collectives, not the messages.
  void exchange(std::span<const Piece> sends, std::span<const Piece> receives,
                Requests& requests);
  void barrier(Requests& requests);

  void send(const Piece& piece, int64_t tag, Requests& requests);
  void recv(const Piece& piece, int64_t tag, Requests& requests);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm::mpi

#include "tessera/comm/mpi/calls.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>

#include "tessera/comm/base/reduce.h"
#include "tessera/comm/mpi/check.h"
#include "tessera/core/error.h"

// Open MPI's constants are casts of this kind.
// NOLINTBEGIN(bugprone-casting-through-void)
namespace tessera::comm::mpi {
namespace {

// So many bytes, as a count of a datatype.
class Bytes {
 public:
  Bytes(int64_t bytes, int64_t largest_count) {
    if (bytes <= largest_count) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(
        MPI_Type_contiguous(static_cast<int>(largest_count), MPI_BYTE, &block),
        "MPI_Type_contiguous");
    const std::array lengths = {static_cast<int>(bytes / largest_count),
                                static_cast<int>(bytes % largest_count)};
    const std::array<MPI_Aint, 2> places = {
        0, static_cast<MPI_Aint>(bytes / largest_count * largest_count)};
    const std::array<MPI_Datatype, 2> types = {block, MPI_BYTE};
    check(MPI_Type_create_struct(2, lengths.data(), places.data(), types.data(),
                                 &type_),
          "MPI_Type_create_struct");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
    MPI_Type_free(&block);
    count_ = 1;
  }
  // What is pending keeps its type.
  ~Bytes() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

MPI_Datatype type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kFloat:
      return MPI_FLOAT;
    case at::kLong:
      return MPI_INT64_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kShort:
      return MPI_INT16_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kByte:
    case at::kBool:
      return MPI_UINT8_T;
    default:
      TORCH_INTERNAL_ASSERT(false, "mpi does not reduce ", dtype);
  }
}

// MPI leaves open what its own min and max make of NaN.
template <ReduceOp op>
void combine(void* in, void* in_out, int* count, MPI_Datatype* type) {
  const std::array<const void*, 2> both = {in_out, in};
  comm::reduce(both, in_out, *count,
               *type == MPI_DOUBLE ? at::kDouble : at::kFloat, op);
}

}  // namespace

struct Requests::Impl {
  // A receive, and what it is to bring.
  struct Expected {
    size_t request = 0;
    int64_t bytes = 0;
  };
  std::vector<MPI_Request> requests;
  std::vector<MPI_Status> statuses;
  std::vector<Expected> expected;
  int64_t source = kAnySource;

  MPI_Request* next() { return &requests.emplace_back(MPI_REQUEST_NULL); }

  [[noreturn]] void throw_failure(int code) const {
    if (code == MPI_ERR_IN_STATUS) {
      for (const Expected& e : expected) {
        int kind = MPI_SUCCESS;
        MPI_Error_class(statuses[e.request].MPI_ERROR, &kind);
        if (kind != MPI_ERR_TRUNCATE) continue;
        C10_THROW_ERROR(DistBackendError,
                        c10::str("group rank ", statuses[e.request].MPI_SOURCE,
                                 " sent more than the ", e.bytes,
                                 " bytes that are received here."));
      }
      for (const MPI_Status& status : statuses) {
        if (status.MPI_ERROR == MPI_ERR_PENDING) continue;
        check(status.MPI_ERROR, "an operation of MPI");
      }
    }
    check(code, "MPI_Testall");
    TORCH_INTERNAL_ASSERT(false, "MPI_Testall failed without an error");
  }

  void check_sizes() {
    for (const Expected& e : expected) {
      const MPI_Status& status = statuses[e.request];
      MPI_Count bytes = 0;
      check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes),
            "MPI_Get_elements_x");
      source = status.MPI_SOURCE;
      if (bytes == e.bytes) continue;
      C10_THROW_ERROR(DistBackendError,
                      c10::str("group rank ", source, " sent ", bytes,
                               " bytes, but ", e.bytes, " are received here."));
    }
  }
};

Requests::Requests() : impl_(std::make_unique<Impl>()) {}
Requests::~Requests() = default;
Requests::Requests(Requests&&) noexcept = default;
Requests& Requests::operator=(Requests&&) noexcept = default;

int64_t Requests::source() const { return impl_->source; }

bool Requests::test() {
  const auto count = static_cast<int>(impl_->requests.size());
  impl_->statuses.resize(impl_->requests.size());
  int done = 0;
  const int code =
      MPI_Testall(count, impl_->requests.data(), &done, impl_->statuses.data());
  if (code != MPI_SUCCESS) impl_->throw_failure(code);
  if (done) impl_->check_sizes();
  return done != 0;
}

struct Comm::Impl {
  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;  // no receive meets an exchange's bytes
  MPI_Op min = MPI_OP_NULL;
  MPI_Op max = MPI_OP_NULL;
  int rank = 0;
  int64_t size = 1;
  int64_t largest = INT_MAX;

  MPI_Op op_of(ReduceOp op, at::ScalarType dtype) const {
    const bool has_nan = at::isFloatingType(dtype);
    switch (op) {
      case ReduceOp::kMin:
        return has_nan ? min : MPI_MIN;
      case ReduceOp::kMax:
        return has_nan ? max : MPI_MAX;
      case ReduceOp::kProduct:
        return MPI_PROD;
      default:
        return MPI_SUM;
    }
  }

  // Calls body(offset, count) for pieces that MPI can count; at least once.
  template <typename Body>
  void in_pieces(int64_t numel, const Body& body) const {
    int64_t offset = 0;
    do {
      const int64_t count = std::min(numel - offset, largest);
      body(offset, static_cast<int>(count));
      offset += count;
    } while (offset < numel);
  }

  void send(MPI_Comm comm, const Piece& piece, int tag,
            Requests::Impl& requests) const {
    const Bytes bytes(piece.bytes, largest);
    check(MPI_Isend(piece.data, bytes.count(), bytes.type(),
                    static_cast<int>(piece.peer), tag, comm, requests.next()),
          "MPI_Isend");
  }

  void recv(MPI_Comm comm, const Piece& piece, int tag,
            Requests::Impl& requests) const {
    const Bytes bytes(piece.bytes, largest);
    const int from = piece.peer == kAnySource ? MPI_ANY_SOURCE
                                              : static_cast<int>(piece.peer);
    requests.expected.push_back({requests.requests.size(), piece.bytes});
    check(MPI_Irecv(piece.data, bytes.count(), bytes.type(), from, tag, comm,
                    requests.next()),
          "MPI_Irecv");
  }
};

namespace {

MPI_Comm made_by(const std::vector<int64_t>& ranks, uint64_t name) {
  // Every MPI has tags up to this one.
  constexpr uint64_t kTags = 32768;
  const std::vector<int> members(ranks.begin(), ranks.end());
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(),
                       &group),
        "MPI_Group_incl");
  // Unlike MPI_Comm_create, called by the members alone.
  check(MPI_Comm_create_group(MPI_COMM_WORLD, group,
                              static_cast<int>(name % kTags), &comm),
        "MPI_Comm_create_group");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN),
        "MPI_Comm_set_errhandler");
  return comm;
}

}  // namespace

Comm::Comm(const std::vector<int64_t>& ranks, uint64_t name,
           int64_t largest_count)
    : impl_(std::make_unique<Impl>()) {
  impl_->collectives = made_by(ranks, name);
  check(MPI_Comm_dup(impl_->collectives, &impl_->messages), "MPI_Comm_dup");
  check(MPI_Op_create(combine<ReduceOp::kMin>, 1, &impl_->min),
        "MPI_Op_create");
  check(MPI_Op_create(combine<ReduceOp::kMax>, 1, &impl_->max),
        "MPI_Op_create");
  check(MPI_Comm_rank(impl_->collectives, &impl_->rank), "MPI_Comm_rank");
  impl_->size = static_cast<int64_t>(ranks.size());
  impl_->largest = largest_count;
}

Comm::~Comm() {
  MPI_Op_free(&impl_->min);
  MPI_Op_free(&impl_->max);
  MPI_Comm_free(&impl_->messages);
  MPI_Comm_free(&impl_->collectives);
}

void Comm::all_reduce(void* data, int64_t numel, at::ScalarType dtype,
                      ReduceOp op, Requests& requests) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  impl_->in_pieces(numel, [&](int64_t offset, int count) {
    check(MPI_Iallreduce(MPI_IN_PLACE, static_cast<char*>(data) + offset * item,
                         count, type_of(dtype), impl_->op_of(op, dtype),
                         impl_->collectives, requests.impl_->next()),
          "MPI_Iallreduce");
  });
}

void Comm::reduce_scatter(void* output, const void* input, int64_t numel,
                          at::ScalarType dtype, ReduceOp op,
                          Requests& requests) {
  if (numel <= impl_->largest) {
    check(MPI_Ireduce_scatter_block(input, output, static_cast<int>(numel),
                                    type_of(dtype), impl_->op_of(op, dtype),
                                    impl_->collectives, requests.impl_->next()),
          "MPI_Ireduce_scatter_block");
    return;
  }
  // The pieces of one call would not lie one after the other.
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  for (int64_t root = 0; root < impl_->size; ++root) {
    impl_->in_pieces(numel, [&](int64_t offset, int count) {
      const char* from =
          static_cast<const char*>(input) + (root * numel + offset) * item;
      check(MPI_Ireduce(from, static_cast<char*>(output) + offset * item, count,
                        type_of(dtype), impl_->op_of(op, dtype),
                        static_cast<int>(root), impl_->collectives,
                        requests.impl_->next()),
            "MPI_Ireduce");
    });
  }
}

void Comm::all_gather(void* output, const void* input, int64_t bytes,
                      Requests& requests) {
  const Bytes piece(bytes, impl_->largest);
  check(MPI_Iallgather(input != nullptr ? input : MPI_IN_PLACE, piece.count(),
                       piece.type(), output, piece.count(), piece.type(),
                       impl_->collectives, requests.impl_->next()),
        "MPI_Iallgather");
}

void Comm::broadcast(void* data, int64_t bytes, int64_t root,
                     Requests& requests) {
  const Bytes whole(bytes, impl_->largest);
  check(MPI_Ibcast(data, whole.count(), whole.type(), static_cast<int>(root),
                   impl_->collectives, requests.impl_->next()),
        "MPI_Ibcast");
}

void Comm::exchange(std::span<const Piece> sends,
                    std::span<const Piece> receives, Requests& requests) {
  const auto is_own = [&](const Piece& p) { return p.peer == impl_->rank; };
  const auto from = std::find_if(sends.begin(), sends.end(), is_own);
  const auto to = std::find_if(receives.begin(), receives.end(), is_own);
  if (from != sends.end() && to != receives.end()) {
    TS_CHECK(from->bytes == to->bytes, "this rank sends itself ", from->bytes,
             " bytes and expects ", to->bytes, ".");
    if (to->bytes > 0) std::memmove(to->data, from->data, to->bytes);
  }
  for (const Piece& piece : receives) {
    if (!is_own(piece)) {
      impl_->recv(impl_->collectives, piece, 0, *requests.impl_);
    }
  }
  for (const Piece& piece : sends) {
    if (!is_own(piece)) {
      impl_->send(impl_->collectives, piece, 0, *requests.impl_);
    }
  }
}

void Comm::barrier(Requests& requests) {
  check(MPI_Ibarrier(impl_->collectives, requests.impl_->next()),
        "MPI_Ibarrier");
}

void Comm::send(const Piece& piece, int64_t tag, Requests& requests) {
  impl_->send(impl_->messages, piece, static_cast<int>(tag), *requests.impl_);
}

void Comm::recv(const Piece& piece, int64_t tag, Requests& requests) {
  impl_->recv(impl_->messages, piece, static_cast<int>(tag), *requests.impl_);
}

}  // namespace tessera::comm::mpi
// NOLINTEND(bugprone-casting-through-void)

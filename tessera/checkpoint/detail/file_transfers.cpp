#include "tessera/checkpoint/detail/file_transfers.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "tessera/checkpoint/detail/file_hash.h"
#include "tessera/checkpoint/detail/posix_file.h"
#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint::detail {
namespace {

constexpr int64_t kPiece = int64_t{16} << 20;

int64_t bytes_of_piece(const FileTransfer& transfer, int64_t piece) {
  return std::clamp<int64_t>(transfer.bytes - piece * kPiece, 0, kPiece);
}

// A file that this rank sends. Where it cannot be read, as many other bytes go:
// the receiver waits for them, and their hash tells.
class Outgoing {
 public:
  Outgoing(const FileTransfer& transfer, const std::string& folder)
      : transfer_(transfer) {
    const std::string path = folder + "/" + transfer.name;
    complaint_ = comm::complaint_of([&] {
      file_ = std::make_unique<PartsOfFile>(path);
      TS_CHECK_IO(std::cmp_equal(file_->size(), transfer.bytes), path, ": has ",
                  file_->size(), " bytes, not ", transfer.bytes);
    });
  }

  comm::Work send(comm::Group& group, int64_t piece) {
    const int64_t bytes = bytes_of_piece(transfer_, piece);
    if (bytes == 0) return {};
    buffer_ = at::zeros({bytes}, at::kByte);
    if (complaint_.empty()) {
      complaint_ = comm::complaint_of([&] {
        file_->read(piece * kPiece,
                    {static_cast<std::byte*>(buffer_.data_ptr()),
                     static_cast<size_t>(bytes)});
      });
    }
    return group.send(buffer_, transfer_.receiver);
  }

  void refuse_failed() const { TS_CHECK_IO(complaint_.empty(), complaint_); }

 private:
  const FileTransfer& transfer_;
  std::unique_ptr<PartsOfFile> file_;
  at::Tensor buffer_;
  std::string complaint_;
};

// A file that this rank receives. Where it cannot be written, its bytes are
// taken all the same: the sender waits until they are.
class Incoming {
 public:
  Incoming(const FileTransfer& transfer, const std::string& folder)
      : transfer_(transfer),
        path_(folder + "/" + transfer.name),
        temporary_(path_ + ".tmp") {
    attempt([&] {
      ::unlink(temporary_.c_str());  // of a start before
      file_ = std::make_unique<NewFile>(temporary_);
    });
  }

  void receive(comm::Group& group, int64_t piece) {
    const int64_t bytes = bytes_of_piece(transfer_, piece);
    if (bytes == 0) return;
    const at::Tensor buffer = at::empty({bytes}, at::kByte);
    group.recv(buffer, transfer_.sender).synchronize();
    attempt([&] {
      file_->write(buffer.const_data_ptr(), buffer.nbytes());
      hash_.update(buffer.const_data_ptr(), buffer.nbytes());
    });
  }

  void finish() {
    attempt([&] {
      TS_CHECK_IO(hash_.digest() == transfer_.hash, path_, ": came from rank ",
                  transfer_.sender, " with XXH3 ", to_hex(hash_.digest()),
                  ", not ", to_hex(transfer_.hash));
      file_->close();
      rename_path(temporary_, path_);
    });
    file_.reset();
  }

  void refuse_failed() const { TS_CHECK_IO(complaint_.empty(), complaint_); }

 private:
  template <typename Work>
  void attempt(const Work& work) {
    if (complaint_.empty()) complaint_ = comm::complaint_of(work);
  }

  const FileTransfer& transfer_;
  const std::string path_, temporary_;
  std::unique_ptr<NewFile> file_;
  FileHash hash_;
  std::string complaint_;
};

}  // namespace

std::string transfer_files(comm::Group& group, const std::string& folder,
                           const std::vector<FileTransfer>& transfers) {
  std::vector<std::unique_ptr<Outgoing>> outgoing;
  std::vector<std::unique_ptr<Incoming>> incoming;
  int64_t pieces = 0;
  for (const FileTransfer& transfer : transfers) {
    const bool sends = transfer.sender == group.rank();
    const bool receives = transfer.receiver == group.rank();
    if (sends) outgoing.push_back(std::make_unique<Outgoing>(transfer, folder));
    if (receives)
      incoming.push_back(std::make_unique<Incoming>(transfer, folder));
    if (sends || receives) {
      pieces = std::max(pieces, (transfer.bytes + kPiece - 1) / kPiece);
    }
  }
  // Who waits, waits for a rank that is at this piece or at one before: never
  // all for each other.
  for (int64_t piece = 0; piece < pieces; ++piece) {
    std::vector<comm::Work> sent;
    for (auto& each : outgoing) sent.push_back(each->send(group, piece));
    for (auto& each : incoming) each->receive(group, piece);
    for (auto& each : sent) each.wait();
  }
  return comm::first_complaint_of(group, "copying files between hosts", [&] {
    for (auto& each : incoming) each->finish();
    for (const auto& each : outgoing) each->refuse_failed();
    for (const auto& each : incoming) each->refuse_failed();
  });
}

}  // namespace tessera::checkpoint::detail

#include "tessera/comm/agree.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>
#include <new>
#include <system_error>

#include "tessera/core/error.h"
#include "tessera/core/screen.h"

namespace tessera::comm {
namespace {

constexpr int64_t kMaxComplaint = 4096;
constexpr int64_t kTag = 32766;  // every MPI has tags up to 32767

at::Tensor to_tensor(const std::string& text) {
  at::Tensor bytes = at::empty({std::ssize(text)}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

std::string to_text(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

// The prefix "[rank 1/2] " is put on again by whoever throws.
std::string without_prefix(const std::string& message) {
  const std::string prefix = rank_context().prefix();
  return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
}

ExitCode code_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error.exit_code();
  } catch (const std::exception&) {
    return ExitCode::kInputOutput;
  }
}

// A thread that meets those of the other ranks until all their work is done.
class Meetings {
 public:
  Meetings(Group& group, const std::string& doing)
      : group_(group),
        doing_(doing),
        all_done_(std::async(kBeside, [this, as = rank_context()] {
          const RankContextGuard speaks_for(as);
          while (!meet()) {
          }
        })) {}
  // Where the work threw, too: the others do not wait for this rank.
  ~Meetings() { be_done(); }
  Meetings(const Meetings&) = delete;
  Meetings& operator=(const Meetings&) = delete;

  // This rank's is: waits for the others', and throws what a meeting ended
  // with.
  void finish() {
    be_done();
    all_done_.get();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Where no more threads are to be had, the rank meets when it is done.
  static constexpr auto kBeside = std::launch::async | std::launch::deferred;
  // Well within any time-out.
  static constexpr std::chrono::milliseconds kBetween{200};
  static constexpr std::chrono::minutes kBetweenWords{1};

  void be_done() {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    changed_.notify_one();
  }

  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kBetween, [this] { return is_done_; });
  }

  bool meet() {
    constexpr int64_t kNobody = -1;
    at::Tensor last =
        at::full({1}, wait() ? kNobody : group_.rank(), at::kLong);
    group_.all_reduce(last, ReduceOp::kMax).synchronize();
    const int64_t rank = last.item<int64_t>();
    const auto now = Clock::now();
    if (rank != kNobody && group_.rank() == 0 && now >= says_next_) {
      says_next_ += kBetweenWords;
      // Not into the log's file, which may lie on the disk that is waited for.
      show_on_screen(c10::str(
          "warning: ", doing_, ": rank ", group_.ranks()[rank],
          " is still at it, after ",
          std::chrono::duration_cast<std::chrono::seconds>(now - start_)
              .count(),
          " s\n"));
    }
    return rank == kNobody;
  }

  Group& group_;
  const std::string doing_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point says_next_ = start_ + kBetweenWords;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
  std::future<void> all_done_;  // last: its thread uses the others
};

}  // namespace

std::string complaint_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return without_prefix(error.what_without_backtrace());
  } catch (const std::system_error& error) {  // of files, or no more threads
    return error.what();
  } catch (const std::bad_alloc& error) {
    return message_of(error);
  }
  return "";
}

std::string first_complaint(Group& group, const std::string& complaint) {
  // One number says who complains first, and the ranks agree on it.
  at::Tensor first = at::scalar_tensor(
      complaint.empty() ? group.size() : group.rank(), at::kLong);
  first = first.reshape({1});
  group.all_reduce(first, ReduceOp::kMin).synchronize();
  const int64_t root = first.item<int64_t>();
  if (root == group.size()) return "";
  std::string text = complaint.substr(0, kMaxComplaint);
  text.resize(kMaxComplaint, '\0');
  at::Tensor bytes = to_tensor(text);
  group.broadcast(bytes, root).synchronize();
  text = to_text(bytes);
  return text.substr(0, text.find('\0'));
}

std::string first_complaint_of(Group& group, const std::string& doing,
                               const std::function<void()>& work) {
  if (group.size() == 1) return complaint_of(work);
  Meetings meetings(group, doing);
  const std::string complaint = complaint_of(work);
  meetings.finish();
  return first_complaint(group, complaint);
}

void on_all(Group& group, const std::string& doing,
            const std::function<void()>& work) {
  std::exception_ptr own;
  const auto remembering = [&] {
    try {
      work();
    } catch (...) {
      own = std::current_exception();
      throw;
    }
  };
  // "78 rank 5: ...": with the code and whose it is.
  const std::string complaint = first_complaint_of(group, doing, [&] {
    const std::string said = complaint_of(remembering);
    TS_CHECK_IO(said.empty(), static_cast<int>(code_of(own)), " rank ",
                group.ranks()[group.rank()], ": ", said);
  });
  if (own) std::rethrow_exception(own);
  if (complaint.empty()) return;
  const size_t space = complaint.find(' ');
  const auto code = static_cast<ExitCode>(std::stoi(complaint));
  TS_CHECK_CODE(false, code, complaint.substr(space + 1));
}

void on_first(Group& group, const std::string& doing,
              const std::function<void()>& work) {
  const std::string complaint = first_complaint_of(group, doing, [&] {
    if (group.rank() == 0) work();
  });
  TS_CHECK_IO(complaint.empty(), complaint);
}

std::vector<std::string> gather_texts(Group& group, const std::string& text) {
  if (group.rank() != 0) {
    at::Tensor size = at::full({1}, std::ssize(text), at::kLong);
    group.send(size, 0, kTag).wait();
    group.send(to_tensor(text), 0, kTag).wait();
    return {};
  }
  std::vector<std::string> texts = {text};
  for (int64_t rank = 1; rank < group.size(); ++rank) {
    at::Tensor size = at::empty({1}, at::kLong);
    group.recv(size, rank, kTag).synchronize();
    at::Tensor bytes = at::empty({size.item<int64_t>()}, at::kByte);
    group.recv(bytes, rank, kTag).synchronize();
    texts.push_back(to_text(bytes));
  }
  return texts;
}

void in_turn(Group& group, const std::function<void()>& work) {
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) work();
    group.barrier();
  }
}

std::string text_of_rank_0(Group& group, const std::string& text) {
  return text_of(group, 0, text);
}

std::string text_of(Group& group, int64_t rank, const std::string& text) {
  at::Tensor size = at::full({1}, std::ssize(text), at::kLong);
  group.broadcast(size, rank).synchronize();
  at::Tensor bytes = group.rank() == rank
                         ? to_tensor(text)
                         : at::empty({size.item<int64_t>()}, at::kByte);
  group.broadcast(bytes, rank).synchronize();
  return to_text(bytes);
}

std::vector<int64_t> numbers_of_rank_0(Group& group,
                                       std::vector<int64_t> numbers) {
  at::Tensor size = at::full({1}, std::ssize(numbers), at::kLong);
  group.broadcast(size, 0).synchronize();
  numbers.resize(size.item<int64_t>());
  if (numbers.empty()) return {};
  at::Tensor values = at::tensor(numbers, at::kLong);
  group.broadcast(values, 0).synchronize();
  const auto* begin = values.const_data_ptr<int64_t>();
  return {begin, begin + numbers.size()};
}

}  // namespace tessera::comm

#include "tessera/verify/detail/late_communicator.h"

#include <ATen/ATen.h>

#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::verify::detail {

// What this rank has begun and not awaited.
struct Ledger {
  std::set<const void*> open;
  std::string fault;  // the first that was let go of
  std::vector<Wait> waits;

  void check() const { TS_CHECK(fault.empty(), "verify: ", fault); }
};

namespace {

// Which instruction waits for what that one began.
std::string awaiting(const std::string& instruction) {
  constexpr std::string_view kBegin = "begin ";
  if (!instruction.starts_with(kBegin)) return instruction;
  return "await " + instruction.substr(kBegin.size());
}

// What is of the next batch has other numbers once that one's step runs.
bool needs(const std::string& instruction, const std::string& begun) {
  const std::string await = awaiting(begun);
  if (instruction == await) return true;
  const size_t op = await.find(' ') + 1, end = await.find(' ', op);
  return begun.find(" version ") != std::string::npos &&
         instruction.starts_with(await.substr(0, end));
}

// A tensor of an operation, and what stands in for it inside.
struct Buffer {
  at::Tensor tensor, inside;

  Buffer() = default;
  Buffer(const at::Tensor& of, comm::Group& group)
      // Autograd sees no change of the tensor itself.
      : tensor(of.variable_data()),
        inside(group.empty(of.sizes(), of.scalar_type())) {
    inside.copy_(tensor);
  }
  bool holds(const at::Tensor& expected) const {
    if (tensor.numel() == 0) return true;
    if (tensor.storage().nbytes() == 0) return false;
    const at::Tensor here = tensor.to(at::kCPU);
    return std::memcmp(here.const_data_ptr(), expected.const_data_ptr(),
                       here.nbytes()) == 0;
  }
};

struct LateWork final : comm::Work::Impl {
  std::shared_ptr<Ledger> ledger;
  std::string what, verb;
  std::string begun = rank_context().doing;
  Buffer read, written;
  comm::Work work;

  LateWork() = default;
  ~LateWork() override {
    if (ledger->open.erase(this) == 0 || !ledger->fault.empty()) return;
    ledger->fault = what + " was let go of and never awaited";
  }
  LateWork(const LateWork&) = delete;
  LateWork& operator=(const LateWork&) = delete;

  bool done() const override { return work.done(); }

  void wait() override {
    if (ledger->open.erase(this) == 0) return;
    const std::string& here = rank_context().doing;
    ledger->waits.push_back({.during = here, .verb = verb});
    TS_CHECK(needs(here, begun), "verify: ", what, " is awaited by \"", here,
             "\", which does not need it");
    work.wait();
    const at::NoGradGuard no_grad;
    if (read.tensor.defined()) {
      TS_CHECK(read.holds(read.inside), "verify: what ", what,
               " reads was changed before it was awaited");
    }
    if (written.tensor.defined()) {
      TS_CHECK(written.holds(at::full_like(written.inside, kPoison)),
               "verify: what ", what,
               " writes was changed before it was awaited");
      written.tensor.copy_(written.inside);
    }
    read = written = {};
  }
};

}  // namespace

class LateGroup final : public comm::Group {
 public:
  LateGroup(comm::Group& inside, std::shared_ptr<Ledger> ledger)
      : inside_(inside), ledger_(std::move(ledger)) {}

  const std::string& name() const override { return inside_.name(); }
  const std::string& backend() const override { return inside_.backend(); }
  const std::vector<int64_t>& ranks() const override { return inside_.ranks(); }
  int64_t rank() const override { return inside_.rank(); }

  comm::Work all_reduce(at::Tensor tensor, comm::ReduceOp op,
                        comm::Mode mode) override {
    return run(mode, "all_reduce", tensor, {}, [&](const auto& x, const auto&) {
      return inside_.all_reduce(x, op, mode);
    });
  }
  comm::Work all_gather(at::Tensor output, at::Tensor input,
                        comm::Mode mode) override {
    return run(mode, "all_gather", output, input,
               [&](const auto& to, const auto& from) {
                 return inside_.all_gather(to, from, mode);
               });
  }
  comm::Work reduce_scatter(at::Tensor output, at::Tensor input,
                            comm::ReduceOp op, comm::Mode mode) override {
    return run(mode, "reduce_scatter", output, input,
               [&](const auto& to, const auto& from) {
                 return inside_.reduce_scatter(to, from, op, mode);
               });
  }
  comm::Work all_to_all(at::Tensor output, at::Tensor input,
                        std::vector<int64_t> output_splits,
                        std::vector<int64_t> input_splits,
                        comm::Mode mode) override {
    return run(mode, "all_to_all", output, input,
               [&](const auto& to, const auto& from) {
                 return inside_.all_to_all(to, from, std::move(output_splits),
                                           std::move(input_splits), mode);
               });
  }
  comm::Work broadcast(at::Tensor tensor, int64_t root,
                       comm::Mode mode) override {
    return run(mode, "broadcast", tensor, {}, [&](const auto& x, const auto&) {
      return inside_.broadcast(x, root, mode);
    });
  }
  comm::Work send(at::Tensor tensor, int64_t peer, int64_t tag) override {
    return run(
        comm::Mode::kAsync, "send", {}, tensor,
        [&](const auto&, const auto& x) { return inside_.send(x, peer, tag); });
  }
  comm::Work recv(at::Tensor tensor, int64_t peer, int64_t tag) override {
    return run(
        comm::Mode::kAsync, "recv", tensor, {},
        [&](const auto& x, const auto&) { return inside_.recv(x, peer, tag); });
  }
  void barrier() override {
    ledger_->check();
    inside_.barrier();
  }
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return inside_.empty(sizes, dtype);
  }
  std::vector<comm::VerbStats> stats() const override {
    return inside_.stats();
  }
  void reset_stats() override { inside_.reset_stats(); }
  std::string flight_record() const override { return inside_.flight_record(); }

 private:
  using Call = std::function<comm::Work(const at::Tensor& written,
                                        const at::Tensor& read)>;

  comm::Work run(comm::Mode mode, const char* verb, const at::Tensor& written,
                 const at::Tensor& read, const Call& call) {
    ledger_->check();
    if (mode == comm::Mode::kBlocking) {
      ledger_->waits.push_back(
          {.during = rank_context().doing, .verb = verb, .inside = true});
      return call(written, read);
    }
    const at::NoGradGuard no_grad;
    auto late = std::make_shared<LateWork>();
    late->ledger = ledger_;
    late->what = what(verb);
    late->verb = verb;
    // A part of what is written may be read: it is taken first.
    const bool apart =
        read.defined() && !(written.defined() && read.is_alias_of(written));
    const Buffer from = read.defined() ? Buffer(read, inside_) : Buffer();
    if (apart) late->read = from;
    if (written.defined()) {
      late->written = Buffer(written, inside_);
      late->written.tensor.fill_(kPoison);
    }
    late->work = call(late->written.inside, from.inside);
    ledger_->open.insert(late.get());
    return comm::Work(std::move(late));
  }

  std::string what(const char* verb) const {
    const std::string& doing = rank_context().doing;
    return c10::str(doing, doing.empty() ? "" : ": ", verb, " in group ",
                    name());
  }

  comm::Group& inside_;
  std::shared_ptr<Ledger> ledger_;
};

LateCommunicator::LateCommunicator(comm::Communicator& inside)
    : inside_(inside), ledger_(std::make_shared<Ledger>()) {}

LateCommunicator::~LateCommunicator() = default;

std::vector<comm::Group*> LateCommunicator::groups() {
  std::vector<comm::Group*> all;
  for (comm::Group* group : inside_.groups()) all.push_back(late(group));
  return all;
}

comm::Group* LateCommunicator::late(comm::Group* group) {
  if (group == nullptr) return nullptr;
  auto& known = groups_[group];
  if (!known) known = std::make_unique<LateGroup>(*group, ledger_);
  return known.get();
}

std::vector<Wait> LateCommunicator::take_waits() {
  return std::exchange(ledger_->waits, {});
}

void LateCommunicator::expect_all_awaited() const {
  ledger_->check();
  TS_CHECK(ledger_->open.empty(), "verify: ", ledger_->open.size(),
           " operations were begun and never awaited");
}

}  // namespace tessera::verify::detail

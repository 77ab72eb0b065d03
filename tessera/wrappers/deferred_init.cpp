#include "tessera/wrappers/deferred_init.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/heard_memory.h"

namespace tessera {
namespace {

using Stack = torch::jit::Stack;
using Memory = const c10::StorageImpl*;  // of meta tensors: who is who

Memory memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// Acts on every tensor in an argument, which it may replace.
template <typename Act>
void for_each(c10::IValue& argument, const Act& act) {
  if (argument.isTensor()) {
    if (argument.toTensor().defined()) argument = act(argument.toTensor());
  } else if (argument.isTensorList()) {
    auto tensors = argument.toTensorVector();
    for (auto& tensor : tensors) tensor = act(tensor);
    argument = tensors;
  } else if (argument.isList()) {
    auto list = argument.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue& each = list.get(i);
      if (each.isTensor()) list.set(i, act(each.toTensor()));
    }
    argument = list;
  }
}

// One operator, as it was called, and the memory that it reads or writes.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  Stack results = {};
  std::vector<Memory> touched = {};
};

at::Tensor meta_like(const at::Tensor& tensor) {
  if (tensor.is_meta()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(at::kMeta));
}

at::Tensor state_of_generator() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

// The process's generator is lent to one operator at a time.
std::mutex& of_generator() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

struct DeferredInit::Impl : wrappers::OperatorTaker {
  void take(const c10::OperatorHandle& op, Stack* stack) override;
  at::Tensor real(const at::Tensor& of,
                  const std::unordered_map<Memory, c10::Storage>& known) const;
  void run(const Call& call, std::unordered_map<Memory, c10::Storage>& known,
           at::Tensor& state) const;

  at::Tensor random;  // the generator's state in the beginning
  std::vector<Call> calls;
  std::map<Memory, c10::Storage> made;  // kept: an address is of one for good
};

// Runs it on the device meta, where it gives shapes alone.
void DeferredInit::Impl::take(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = static_cast<int64_t>(schema.arguments().size());
  Call call{.op = op, .arguments = Stack(stack->end() - count, stack->end())};
  bool is_ours = false;
  // A view: the tensor itself may get other memory by set_data().
  const auto note = [&](const at::Tensor& tensor) {
    if (tensor.is_meta()) {
      is_ours = true;
      call.touched.push_back(memory_of(tensor));
      made.emplace(memory_of(tensor), tensor.storage());
    }
    return tensor.detach();
  };
  for (auto& each : call.arguments) for_each(each, note);
  const auto first = stack->end() - count;
  for (int64_t i = 0; i < count; ++i) {
    if (schema.arguments()[i].name() != "device") continue;
    if (!first[i].isNone() && !first[i].toDevice().is_cpu()) continue;
    is_ours = true;
    first[i] = at::Device(at::kMeta);
  }
  if (is_ours) {
    std::for_each(first, stack->end(),
                  [](c10::IValue& each) { for_each(each, meta_like); });
  }
  op.callBoxed(stack);
  if (!is_ours) return;
  call.results =
      Stack(stack->end() - static_cast<int64_t>(schema.returns().size()),
            stack->end());
  for (auto& each : call.results) for_each(each, note);
  calls.push_back(std::move(call));
}

// The same view of real memory.
at::Tensor DeferredInit::Impl::real(
    const at::Tensor& of,
    const std::unordered_map<Memory, c10::Storage>& known) const {
  if (!of.is_meta()) return of;
  const auto found = known.find(memory_of(of));
  TS_CHECK(found != known.end(), "DeferredInit: a tensor of shape ", of.sizes(),
           " was made in a way that is not recorded.");
  at::Tensor view = at::empty({0}, of.options().device(at::kCPU));
  view.set_(found->second, of.storage_offset(), of.sizes(), of.strides());
  return view;
}

void DeferredInit::Impl::run(const Call& call,
                             std::unordered_map<Memory, c10::Storage>& known,
                             at::Tensor& state) const {
  Stack stack = call.arguments;
  for (auto& each : stack) {
    for_each(each,
             [&](const at::Tensor& tensor) { return real(tensor, known); });
  }
  if (call.op.hasTag(at::Tag::nondeterministic_seeded)) {
    const std::lock_guard lock(of_generator());
    auto generator = at::detail::getDefaultCPUGenerator();
    const at::Tensor before = generator.get_state();
    generator.set_state(state);
    const auto give_back = c10::make_scope_exit([&] {
      state = generator.get_state();
      generator.set_state(before);
    });
    call.op.callBoxed(&stack);
  } else {
    call.op.callBoxed(&stack);
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    std::vector<Memory> recorded;
    c10::IValue meta = call.results[i];
    for_each(meta, [&](const at::Tensor& tensor) {
      recorded.push_back(memory_of(tensor));
      return tensor;
    });
    auto next = recorded.begin();
    for_each(stack[i], [&](const at::Tensor& tensor) {
      known.emplace(*next++, tensor.storage());
      return tensor;
    });
  }
}

DeferredInit::DeferredInit() : impl_(std::make_unique<Impl>()) {}
DeferredInit::~DeferredInit() = default;

bool DeferredInit::made(const at::Tensor& tensor) const {
  return tensor.is_meta() && impl_->made.contains(memory_of(tensor));
}

void DeferredInit::replay(
    const std::vector<at::Tensor>& tensors, bool compute,
    const std::function<void(size_t, const at::Tensor&)>& take) const {
  const wrappers::Unheard unheard;
  const at::NoGradGuard no_grad;
  std::unordered_map<Memory, size_t> last_call;
  for (size_t i = 0; i < impl_->calls.size(); ++i) {
    for (Memory memory : impl_->calls[i].touched) last_call[memory] = i;
  }
  std::map<size_t, std::vector<size_t>> ready;  // by call: which tensors
  for (size_t i = 0; i < tensors.size(); ++i) {
    TS_CHECK(made(tensors[i]), "DeferredInit: tensor ", i, " of shape ",
             tensors[i].sizes(),
             " was not made in make(), or was replaced since.");
    ready[last_call.at(memory_of(tensors[i]))].push_back(i);
  }
  std::unordered_map<Memory, c10::Storage> known;
  at::Tensor state = impl_->random;
  for (size_t i = 0; i < impl_->calls.size(); ++i) {
    const Call& call = impl_->calls[i];
    if (compute) impl_->run(call, known, state);
    if (const auto found = ready.find(i); found != ready.end()) {
      for (size_t which : found->second) {
        take(which,
             compute ? impl_->real(tensors[which], known) : at::Tensor());
      }
    }
    for (Memory memory : call.touched) {
      if (last_call.at(memory) == i) known.erase(memory);
    }
  }
}

struct DeferredInit::Recording::Guard {
  explicit Guard(Impl& of) : random(state_of_generator()), taken(of) {
    if (!of.random.defined()) of.random = random;
  }
  const at::Tensor random;
  const wrappers::TakenOperators taken;
};

DeferredInit::Recording::Recording(DeferredInit& of)
    : guard_(std::make_unique<Guard>(*of.impl_)) {}
DeferredInit::Recording::~Recording() = default;

}  // namespace tessera

#include "tessera/wrappers/detail/heard_memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

namespace tessera::wrappers {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

struct Heard {
  Listener* listener;
  int64_t tag;
};

// Ranks may be threads: memory is the process's, a listener is a rank's.
struct Register {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Heard> heard;
};

Register& all() {
  static Register instance;
  return instance;
}

std::optional<Heard> find(const at::Tensor& tensor) {
  Register& registered = all();
  const std::shared_lock lock(registered.mutex);
  const auto found =
      registered.heard.find(tensor.storage().unsafeGetStorageImpl());
  if (found == registered.heard.end()) return std::nullopt;
  return found->second;
}

void tell(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kKey)) return;
  if (const auto heard = find(tensor)) heard->listener->on_use(heard->tag);
}

void tell(const c10::IValue& argument) {
  if (argument.isTensor()) {
    tell(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorList()) tell(tensor);
  } else if (argument.isList()) {  // of tensors that may be absent
    for (const c10::IValue& each : argument.toListRef()) {
      if (each.isTensor()) tell(each.toTensor());
    }
  }
}

void tell_and_run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Unheard unheard;
  const size_t count = op.schema().arguments().size();
  for (const c10::IValue& argument : torch::jit::last(*stack, count)) {
    tell(argument);
  }
  op.callBoxed(stack);
}

// A tensor's keys are its implementation's own.
struct Keys : c10::TensorImpl {
  static void add(c10::TensorImpl& tensor) {
    c10::DispatchKeySet c10::TensorImpl::* const keys = &Keys::key_set_;
    tensor.*keys = (tensor.*keys).add(kKey);
  }
};

}  // namespace

HeardMemory::~HeardMemory() {
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  for (const auto& storage : heard_) {
    registered.heard.erase(storage.unsafeGetStorageImpl());
  }
}

void HeardMemory::hear(const at::Tensor& tensor, int64_t tag) {
  Keys::add(*tensor.unsafeGetTensorImpl());
  const c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  const auto [found, is_new] =
      registered.heard.try_emplace(memory, Heard{&listener_, tag});
  TORCH_INTERNAL_ASSERT(is_new || found->second.listener == &listener_,
                        "two listen to one memory");
  if (is_new) heard_.push_back(tensor.storage());
}

Unheard::Unheard() : guard_(kKey) {}

}  // namespace tessera::wrappers

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<
                   &tessera::wrappers::tell_and_run>());
}

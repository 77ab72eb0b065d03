#include "tessera/wrappers/detail/heard_memory.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "tessera/wrappers/detail/heard_products.h"

namespace tessera::wrappers {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

struct Heard {
  Listener* listener;
  int64_t tag;
};

struct Substituted {
  Substitute* substitute;
  int64_t tag;
  int64_t shared_dim;
};

// Ranks may be threads: memory is the process's, a listener is a rank's.
struct Register {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Heard> heard;
  // By memory and where in it they begin.
  std::map<std::pair<const c10::StorageImpl*, int64_t>, Substituted>
      substituted;
};

Register& all() {
  static Register instance;
  return instance;
}

template <typename Map>
std::optional<typename Map::mapped_type> find(
    const Map& map, const typename Map::key_type& key) {
  const std::shared_lock lock(all().mutex);
  const auto found = map.find(key);
  if (found == map.end()) return std::nullopt;
  return found->second;
}

// The tensors of ours among an operator's arguments.
template <typename Act>
void for_each(const c10::IValue& argument, const Act& act) {
  const auto take = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.key_set().has(kKey)) act(tensor);
  };
  if (argument.isTensor()) {
    take(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorList()) take(tensor);
  } else if (argument.isList()) {  // of tensors that may be absent
    for (const c10::IValue& each : argument.toListRef()) {
      if (each.isTensor()) take(each.toTensor());
    }
  }
}

thread_local OperatorTaker* taker = nullptr;
thread_local bool goes_forward_again = false;

void tell_and_run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Unheard unheard;
  if (taker) return taker->take(op, stack);
  const bool goes_back =
      torch::autograd::get_current_graph_task_id() != -1 && !goes_forward_again;
  std::optional<Substituted> substituted;
  bool is_heard = false;
  const auto& arguments = op.schema().arguments();
  const size_t count = arguments.size();
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    for_each(torch::jit::peek(*stack, i, count), [&](const at::Tensor& tensor) {
      const auto* memory = tensor.storage().unsafeGetStorageImpl();
      if (const auto heard = find(all().heard, memory)) {
        heard->listener->on_use(heard->tag, tensor);
        if (writes) heard->listener->on_write(heard->tag, op.schema().name());
        is_heard = true;
      }
      const auto found =
          find(all().substituted, {memory, tensor.storage_offset()});
      if (found) substituted = found;
    });
  }
  if (!goes_back && substituted) {
    if (substituted->substitute->run(op, stack, substituted->tag)) return;
  } else if (!goes_back && is_heard && run_product(op, stack)) {
    return;
  }
  op.callBoxed(stack);
}

// A tensor's keys are its implementation's own.
struct Keys : c10::TensorImpl {
  static c10::DispatchKeySet& of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->*(&Keys::key_set_);
  }
  static void add(const at::Tensor& tensor) {
    of(tensor) = of(tensor).add(kKey);
  }
};

using Place = std::pair<const c10::StorageImpl*, int64_t>;

Place place_of(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()};
}

void substitute(const at::Tensor& parameter, const Substituted& by) {
  Keys::add(parameter);
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  registered.substituted[place_of(parameter)] = by;
}

}  // namespace

HeardMemory::~HeardMemory() {
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  for (const auto& storage : heard_) {
    registered.heard.erase(storage.unsafeGetStorageImpl());
  }
}

void HeardMemory::hear(const at::Tensor& tensor, int64_t tag) {
  Keys::add(tensor);
  const c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  const auto [found, is_new] =
      registered.heard.try_emplace(memory, Heard{&listener_, tag});
  TORCH_INTERNAL_ASSERT(is_new || found->second.listener == &listener_,
                        "two listen to one memory");
  if (is_new) heard_.push_back(tensor.storage());
}

SubstitutedParameters::~SubstitutedParameters() {
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  std::erase_if(registered.substituted, [this](const auto& each) {
    return each.second.substitute == &substitute_;
  });
}

void SubstitutedParameters::add(const at::Tensor& parameter, int64_t tag,
                                int64_t shared_dim) {
  substitute(parameter, {&substitute_, tag, shared_dim});
}

CarriedSubstitute::CarriedSubstitute(const at::Tensor& parameter) {
  Register& registered = all();
  const std::unique_lock lock(registered.mutex);
  const auto found = registered.substituted.find(place_of(parameter));
  if (found == registered.substituted.end()) return;
  substitute_ = found->second.substitute;
  tag_ = found->second.tag;
  shared_dim_ = found->second.shared_dim;
  registered.substituted.erase(found);
}

void CarriedSubstitute::put(const at::Tensor& parameter) const {
  if (substitute_) substitute(parameter, {substitute_, tag_, shared_dim_});
}

std::optional<Share> known_share(const at::Tensor& parameter) {
  // Of other memory nothing is known, also where it lies in the place of ours.
  if (!parameter.key_set().has(kKey)) return std::nullopt;
  const auto found = find(all().substituted, place_of(parameter));
  if (!found || found->shared_dim < 0) return std::nullopt;
  const comm::Group& group = found->substitute->group();
  return Share{found->shared_dim, group.ranks(), group.rank()};
}

TakenOperators::TakenOperators(OperatorTaker& by)
    : before_(std::exchange(taker, &by)), guard_(kKey) {}
TakenOperators::~TakenOperators() { taker = before_; }

ForwardAgain::ForwardAgain()
    : before_(std::exchange(goes_forward_again, true)) {}
ForwardAgain::~ForwardAgain() { goes_forward_again = before_; }

at::Tensor unheard(const at::Tensor& tensor) {
  const Unheard guard;
  const at::Tensor view = tensor.detach();
  Keys::of(view) = Keys::of(view).remove(kKey);
  return view;
}

Unheard::Unheard() : guard_(kKey) {}

}  // namespace tessera::wrappers

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<
                   &tessera::wrappers::tell_and_run>());
}

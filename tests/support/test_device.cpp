#include "tests/support/test_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "tessera/core/device.h"
#include "tessera/core/error.h"

namespace tessera::testing {
namespace {

constexpr at::DeviceType kType = at::DeviceType::HPU;

thread_local int64_t reads = 0;

// One piece of memory at two places: `far`, which nobody can reach, is what
// tensors hold; `near` is for those who copy.
class Memory {
 public:
  Memory() {
    const int file = memfd_create("test device", MFD_CLOEXEC);
    TS_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "memfd");
    far_ = map(file, PROT_NONE);
    near_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    free_.emplace(0, kBytes);
  }

  void* allocate(size_t bytes) {
    const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, limit_ == 0 || in_use_ + size <= limit_,
                     "the test device is out of memory: ", size,
                     " bytes more.\nIts allocator says more.");
    for (auto [begin, length] : free_) {
      if (length < size) continue;
      free_.erase(begin);
      if (length > size) free_.emplace(begin + size, length - size);
      used_.emplace(begin, size);
      in_use_ += size;
      return far_ + begin;
    }
    TS_CHECK(false, "the test device is out of memory");
    return nullptr;
  }

  void release(void* at) {
    const std::lock_guard lock(mutex_);
    const auto used = used_.find(static_cast<char*>(at) - far_);
    size_t begin = used->first, length = used->second;
    used_.erase(used);
    in_use_ -= length;
    auto next = free_.lower_bound(begin);
    if (next != free_.end() && next->first == begin + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() &&
        std::prev(next)->first + std::prev(next)->second == begin) {
      std::prev(next)->second += length;
      return;
    }
    free_.emplace(begin, length);
  }

  void limit(size_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

  void* near(const void* far) const {
    return near_ + (static_cast<const char*>(far) - far_);
  }

 private:
  static constexpr size_t kBytes = size_t{4} << 30;  // as it is touched
  static constexpr size_t kAlignment = 64;

  static char* map(int file, int protection) {
    void* const at =
        mmap(nullptr, kBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TS_CHECK(at != MAP_FAILED, "mmap");
    return static_cast<char*>(at);
  }

  char* far_ = nullptr;
  char* near_ = nullptr;
  std::mutex mutex_;
  size_t limit_ = 0, in_use_ = 0;
  std::map<size_t, size_t> free_, used_;  // length by begin
};

// For good: tensors may be let go of at the very end.
Memory& memory() {
  static auto* const all = new Memory();
  return *all;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, 0);
    if (bytes == 0) return {nullptr, device};
    void* const at = memory().allocate(bytes);
    tell(at, static_cast<int64_t>(bytes));
    return {at, at, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(memory().near(to), memory().near(from), bytes);
  }
  static void release(void* at) {
    tell(at, -1);  // before another gets it
    memory().release(at);
  }
  // As CUDA's does.
  static void tell(void* at, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(at, bytes, 0, 0, {kType, 0});
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {kType, 0});
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {kType, 0});
  }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

struct Hooks final : at::HPUHooksInterface {
  void init() const override {}
  bool hasHPU() const override { return has_test_device(); }
  bool isBuilt() const override { return has_test_device(); }
  bool isAvailable() const override { return has_test_device(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
[[maybe_unused]] const bool is_registered = [] {
  at::HPUHooksRegistry()->Register(
      "HPUHooks", [](at::HPUHooksArgs) { return std::make_unique<Hooks>(); });
  return true;
}();

// The CPU's view of a tensor, wherever it lies.
at::Tensor near(const at::Tensor& x) {
  if (x.device().type() != kType || x.storage().nbytes() == 0) {
    return x.device().is_cpu()
               ? x
               : at::empty(x.sizes(), x.options().device(at::kCPU));
  }
  char* const first = static_cast<char*>(memory().near(x.storage().data()));
  return at::from_blob(first + x.storage_offset() * x.itemsize(), x.sizes(),
                       x.strides(), x.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::HPU),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>,
                         std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::HPU),
      c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.is_cpu() && !from.is_cpu()) ++reads;
  near(to).copy_(near(from));
  return to;
}

const at::Tensor& resize_to(const at::Tensor& x, c10::IntArrayRef sizes,
                            std::optional<at::MemoryFormat>) {
  auto* const impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t bytes = (x.storage_offset() + x.numel()) * x.itemsize();
  auto& storage = *x.storage().unsafeGetStorageImpl();
  if (storage.nbytes() < bytes) {
    c10::DataPtr grown = allocator.allocate(bytes);
    if (storage.nbytes() > 0) {
      allocator.copy_data(grown.get(), storage.data(), storage.nbytes());
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
  return x;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_to(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& x, at::Storage storage, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* const impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return x;
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(),
                     source.sizes(), source.strides());
}

at::Scalar read_scalar(const at::Tensor& x) {
  ++reads;
  return at::_local_scalar_dense(near(x));
}

// The host does not wait for it.
void assert_soon(const at::Tensor& x, std::string_view fault) {
  TS_CHECK(*near(x).const_data_ptr<bool>(), fault);
}

// The composition of attention, of operators that are here.
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                   const std::optional<at::Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;
}

// Numbers alone may be the CPU's.
void check_devices(const c10::OperatorHandle& op,
                   const torch::jit::Stack& all) {
  const auto check = [&](const at::Tensor& x) {
    TS_CHECK(!x.defined() || !x.is_cpu() || x.dim() == 0, op.schema().name(),
             " on the device gets a tensor ", x.sizes(), " of the CPU.");
  };
  for (const auto& each :
       torch::jit::last(all, op.schema().arguments().size())) {
    if (each.isTensor()) check(each.toTensor());
    if (each.isTensorList()) {
      for (const at::Tensor& x : each.toTensorVector()) check(x);
    }
  }
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TS_CHECK(op.schema().name().find("_for_cpu") == std::string::npos,
           op.schema().name(), " is the CPU's alone.");
  check_devices(op, *stack);
  const int64_t before = reads;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  reads = before;  // its own copies are none
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_to);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("_assert_async.msg", assert_soon);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

}  // namespace

bool has_test_device() { return !has_cuda(); }

at::Device test_device() { return {kType, 0}; }

void limit_test_device(int64_t bytes) {
  memory().limit(static_cast<size_t>(bytes));
}

int64_t reads_of_device() { return reads; }

}  // namespace tessera::testing

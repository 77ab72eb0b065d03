#include "tessera/verify/detail/host_reads.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <string_view>

#include "tessera/core/host_read.h"

namespace tessera::verify::detail {
namespace {

// Of item() and whatever asks for a number, and of shapes that depend on data.
constexpr std::string_view kReads[] = {
    "aten::_local_scalar_dense", "aten::equal",    "aten::nonzero",
    "aten::masked_select",       "aten::_unique2", "aten::bincount"};

// How deep in operators whose kernels for devices read on the device what those
// for the CPU ask for by item().
thread_local int64_t inside = 0;
thread_local int64_t operators = 0;

bool reads_on_device(std::string_view name) {
  return name.starts_with("aten::_fused_");
}

std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
  const std::string_view name = call.name();
  if (reads_on_device(name)) ++inside;
  if (inside == 0 && std::ranges::count(kReads, name) > 0) ++operators;
  return nullptr;
}

void on_return(const at::RecordFunction& call, at::ObserverContext*) {
  if (reads_on_device(call.name())) --inside;
}

}  // namespace

HostReads::HostReads()
    : before_(host_reads()),
      callback_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(on_call, on_return)
              .scopes({at::RecordScope::FUNCTION}))) {
  operators = 0;
}

HostReads::~HostReads() { at::removeCallback(callback_); }

int64_t HostReads::count() const { return host_reads() - before_ + operators; }

}  // namespace tessera::verify::detail

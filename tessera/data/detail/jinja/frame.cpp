#include "tessera/data/detail/jinja/frame.h"

#include "tessera/data/detail/jinja/budget.h"

namespace tessera::data::jinja {

namespace {

constexpr int64_t kStepsOfFrame = 10;
constexpr int64_t kBytesOfFrame = 2048;  // with a loop's variable
constexpr int64_t kNamesAStep = 8;

}  // namespace

Rendering::~Rendering() {
  for (const auto& space : spaces) space->attributes.items.clear();
}

void Rendering::keep_frames() {
  use_bytes(static_cast<int64_t>(frames.size() - num_kept) * kBytesOfFrame);
  num_kept = frames.size();
  ++num_macros;
}

Scope::Scope(Frame& parent)
    : rendering_(parent.rendering),
      num_macros_(rendering_.num_macros),
      frame_(rendering_.frames.emplace_back(Frame{rendering_, &parent})) {
  use_steps(kStepsOfFrame);
}

Scope::~Scope() {
  if (rendering_.num_macros != num_macros_) return;
  while (&rendering_.frames.back() != &frame_) rendering_.frames.pop_back();
  rendering_.frames.pop_back();
}

const Value* Frame::find(const std::string& name) const {
  for (const Frame* frame = this; frame != nullptr; frame = frame->parent) {
    use_steps(1 + std::ssize(frame->names) / kNamesAStep);
    for (const auto& item : frame->names) {
      if (item.first == name) return &item.second;
    }
  }
  return nullptr;
}

void Frame::set(const std::string& name, Value value) {
  for (auto& item : names) {
    if (item.first == name) {
      item.second = std::move(value);
      return;
    }
  }
  names.emplace_back(name, std::move(value));
}

}  // namespace tessera::data::jinja

#include "tessera/data/detail/jinja/frame.h"

namespace tessera::data::jinja {

Frame& Rendering::add(Frame* parent) {
  return frames.emplace_back(Frame{*this, parent});
}

const Value* Frame::find(const std::string& name) const {
  for (const Frame* frame = this; frame != nullptr; frame = frame->parent) {
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

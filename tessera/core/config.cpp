#include "tessera/core/config.h"

#include <algorithm>
#include <limits>

#include "tessera/core/detail/config_impl.h"
#include "tessera/core/edit_distance.h"
#include "tessera/core/error.h"

namespace tessera::config {
namespace {

constexpr size_t kLongestWord = 64;  // for which a nearest one is looked for

template <typename T>
std::shared_ptr<Key::Impl> bind(const std::string& name, T& member,
                                const std::string& meaning) {
  auto impl = std::make_shared<Key::Impl>();
  impl->name = name;
  impl->meaning = meaning;
  impl->default_value = member;
  impl->get = [&member] { return Value(member); };
  impl->set = [&member](const Value& value) { member = std::get<T>(value); };
  return impl;
}

template <typename T>
Key add(Section::Impl& section, const std::string& name, T& member,
        const std::string& meaning) {
  auto impl = bind(name, member, meaning);
  section.items.emplace_back(impl);
  return Key(impl);
}

}  // namespace

Key& Key::at_least(double minimum) {
  impl_->minimum = minimum;
  return *this;
}

Key& Key::at_most(double maximum) {
  impl_->maximum = maximum;
  return *this;
}

Key& Key::more_than(double bound) {
  impl_->bound = bound;
  return *this;
}

Key& Key::one_of(std::vector<std::string> choices) {
  impl_->choices = std::move(choices);
  return *this;
}

Key& Key::check(std::function<std::string(const Value&)> complaint) {
  impl_->checks.push_back(std::move(complaint));
  return *this;
}

Section::Section() : impl_(std::make_shared<Impl>()) {}

Key Section::key(const std::string& name, bool& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}
Key Section::key(const std::string& name, int64_t& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}
Key Section::key(const std::string& name, double& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}
Key Section::key(const std::string& name, std::string& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}
Key Section::key(const std::string& name, std::vector<std::string>& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}
Key Section::key(const std::string& name, std::vector<double>& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}
Key Section::key(const std::string& name, std::vector<int64_t>& member,
                 const std::string& meaning) {
  return add(*impl_, name, member, meaning);
}

Key Section::add_objects(const std::string& name, ObjectList list,
                         const std::string& meaning) {
  auto impl = std::make_shared<Key::Impl>();
  impl->name = name;
  impl->meaning = meaning;
  impl->objects = std::make_shared<ObjectList>(std::move(list));
  impl->get = [objects = impl->objects] {
    auto all = detail::Json::array();
    for (size_t i = 0; i < objects->size(); ++i) {
      Section each;
      objects->declare(i, each);
      all.push_back(detail::values_of(each));
    }
    return Value(Objects{all.dump()});
  };
  impl->default_value = impl->get();
  impl_->items.emplace_back(impl);
  return Key(impl);
}

Section& Section::add_section(const std::string& name,
                              const std::string& meaning) {
  auto section = std::make_shared<Section>();
  impl_->items.emplace_back(NamedSection{name, meaning, section});
  return *section;
}

void detail::for_each_key(
    const Section& section, const std::string& prefix,
    const std::function<void(const std::string&, Key::Impl&)>& on_key) {
  for (const auto& item : section.impl().items) {
    if (const auto* key = std::get_if<std::shared_ptr<Key::Impl>>(&item)) {
      on_key(prefix + (*key)->name, **key);
    } else {
      const auto& below = std::get<NamedSection>(item);
      for_each_key(*below.section, prefix + below.name + ".", on_key);
    }
  }
}

std::optional<std::string> nearest(const std::string& word,
                                   const std::vector<std::string>& candidates) {
  if (word.size() > kLongestWord) return std::nullopt;
  const std::string* best = nullptr;
  int64_t best_distance = std::numeric_limits<int64_t>::max();
  for (const auto& candidate : candidates) {
    const int64_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = &candidate;
      best_distance = distance;
    }
  }
  const auto longer =
      static_cast<int64_t>(best ? std::max(word.size(), best->size()) : 0);
  // A third of the letters may differ; of a word of two, one.
  const bool near = best && best_distance <= std::max<int64_t>(1, longer / 3) &&
                    best_distance < longer;
  return near ? std::optional(*best) : std::nullopt;
}

}  // namespace tessera::config

// A JSON object that keeps the order of its keys and finds one among a hundred
// thousand at once: nlohmann's ordered_map searches from the front, which makes
// reading a vocabulary quadratic.
//
// What nlohmann::basic_json asks of its object type, and no more.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::detail {

template <class Key, class T, class IgnoredLess = std::less<Key>,
          class Allocator = std::allocator<std::pair<const Key, T>>>
class IndexedObject : public std::vector<std::pair<const Key, T>, Allocator> {
 public:
  using key_type = Key;
  using mapped_type = T;
  using Container = std::vector<std::pair<const Key, T>, Allocator>;
  using iterator = typename Container::iterator;
  using const_iterator = typename Container::const_iterator;
  using value_type = typename Container::value_type;
  using key_compare = std::equal_to<>;
  using Container::Container;

  template <typename AnyKey>
  std::pair<iterator, bool> emplace(AnyKey&& key, T&& value) {
    const size_t at = position_of(key);
    if (at < this->size()) return {this->begin() + at, false};
    Container::emplace_back(std::forward<AnyKey>(key), std::move(value));
    extend_index();
    return {std::prev(this->end()), true};
  }
  std::pair<iterator, bool> insert(const value_type& value) {
    return emplace(value.first, T(value.second));
  }
  std::pair<iterator, bool> insert(value_type&& value) {
    return emplace(value.first, std::move(value.second));
  }
  template <typename InputIt>
  void insert(InputIt first, InputIt last) {
    for (; first != last; ++first) insert(*first);
  }

  T& operator[](std::string_view key) {
    return emplace(Key(key), T{}).first->second;
  }
  T& at(std::string_view key) { return Container::at(position_of(key)).second; }
  const T& at(std::string_view key) const {
    return Container::at(position_of(key)).second;
  }

  size_t count(std::string_view key) const {
    return position_of(key) < this->size() ? 1 : 0;
  }
  iterator find(std::string_view key) {
    return this->begin() + position_of(key);
  }
  const_iterator find(std::string_view key) const {
    return this->begin() + position_of(key);
  }

  void clear() noexcept {
    Container::clear();
    index_.clear();
  }

  size_t erase(std::string_view key) {
    const size_t at = position_of(key);
    if (at == this->size()) return 0;
    erase(this->begin() + at);
    return 1;
  }
  iterator erase(iterator position) {
    return erase(position, std::next(position));
  }
  // The pairs' const keys cannot be moved over: all is moved to a new vector.
  iterator erase(iterator first, iterator last) {
    const auto at = first - this->begin();
    Container kept;
    kept.reserve(this->size());
    for (auto it = this->begin(); it != this->end(); ++it) {
      if (it < first || it >= last) kept.push_back(std::move(*it));
    }
    Container::swap(kept);
    index_.clear();
    extend_index();
    return this->begin() + at;
  }

 private:
  static constexpr size_t kSearched = 16;  // pairs that need no index

  static size_t hash_of(std::string_view key) {
    return std::hash<std::string_view>{}(key);
  }
  void extend_index() {
    if (this->size() <= kSearched) return;
    for (size_t at = index_.size(); at < this->size(); ++at) {
      index_.emplace(hash_of(Container::operator[](at).first), at);
    }
  }

  size_t position_of(std::string_view key) const {
    if (!index_.empty()) {
      const auto [first, last] = index_.equal_range(hash_of(key));
      for (auto it = first; it != last; ++it) {
        if (Container::operator[](it->second).first == key) return it->second;
      }
    }
    for (size_t at = index_.size(); at < this->size(); ++at) {
      if (Container::operator[](at).first == key) return at;
    }
    return this->size();
  }

  std::unordered_multimap<size_t, size_t> index_;  // hash to position
};

}  // namespace tessera::detail

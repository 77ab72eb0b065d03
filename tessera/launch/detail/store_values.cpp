#include "tessera/launch/detail/store_values.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace tessera::launch::detail {
namespace {

using Clock = std::chrono::steady_clock;

std::optional<std::vector<std::string>> keys_in(MessageReader& read) {
  std::vector<std::string> keys;
  while (!read.at_end()) {
    auto key = read.bytes();
    if (!key) return std::nullopt;
    keys.push_back(std::move(*key));
  }
  return keys;
}

Clock::time_point end_of(int64_t milliseconds) {
  constexpr int64_t kYear = int64_t{1000} * 60 * 60 * 24 * 365;
  return Clock::now() +
         std::chrono::milliseconds(std::clamp<int64_t>(milliseconds, 0, kYear));
}

MessageWriter done() { return MessageWriter(Answer::kDone); }

}  // namespace

std::optional<StoreValues::Outcome> StoreValues::hear(
    std::string_view message) {
  MessageReader read(message);
  const auto word = read.word();
  if (!word) return std::nullopt;
  const auto request = static_cast<Request>(*word);
  switch (request) {
    case Request::kSet: {
      const auto key = read.bytes(), value = read.bytes();
      if (!value || !read.at_end()) return std::nullopt;
      put(*key, *value);
      return done();
    }
    case Request::kGet:
    case Request::kWait: {
      const auto time = read.number();
      auto keys = keys_in(read);
      if (!time || !keys || keys->empty()) return std::nullopt;
      if (request == Request::kGet && keys->size() > 1) return std::nullopt;
      return Wait{.keys = std::move(*keys),
                  .end = end_of(*time),
                  .gets = request == Request::kGet};
    }
    case Request::kCheck: {
      const auto keys = keys_in(read);
      if (!keys) return std::nullopt;
      return done().add(int64_t{are_there(*keys)});
    }
    case Request::kAdd: {
      const auto key = read.bytes();
      const auto number = read.number();
      if (!number || !read.at_end()) return std::nullopt;
      const auto sum = add(*key, *number);
      if (!sum) return std::nullopt;
      return done().add(*sum);
    }
    case Request::kCompareSet: {
      const auto key = read.bytes(), expected = read.bytes(),
                 desired = read.bytes();
      if (!desired || !read.at_end()) return std::nullopt;
      return done().add(compare_set(*key, *expected, *desired));
    }
    case Request::kDelete: {
      const auto key = read.bytes();
      if (!key || !read.at_end()) return std::nullopt;
      return done().add(static_cast<int64_t>(values_.erase(*key)));
    }
    case Request::kCount:
      if (!read.at_end()) return std::nullopt;
      return done().add(static_cast<int64_t>(values_.size()));
  }
  return std::nullopt;
}

// Of many that wait for many keys: each key is looked up once until it is
// there, and all once more at the end, for keys may go.
std::optional<MessageWriter> StoreValues::answer_to(Wait& wait) const {
  while (wait.found < wait.keys.size() &&
         values_.contains(wait.keys[wait.found])) {
    ++wait.found;
  }
  if (wait.found == wait.keys.size()) {
    if (are_there(wait.keys)) {
      MessageWriter answer = done();
      if (wait.gets) answer.add(values_.at(wait.keys.front()));
      return answer;
    }
    wait.found = 0;
  }
  if (Clock::now() < wait.end) return std::nullopt;
  return MessageWriter(Answer::kTimedOut);
}

bool StoreValues::are_there(const std::vector<std::string>& keys) const {
  return std::ranges::all_of(
      keys, [&](const std::string& key) { return values_.contains(key); });
}

void StoreValues::put(const std::string& key, std::string value) {
  values_[key] = std::move(value);
  has_news_ = true;
}

// As c10d's TCPStore: a key that is not there is only set where nothing is
// expected.
std::string StoreValues::compare_set(const std::string& key,
                                     const std::string& expected,
                                     const std::string& desired) {
  const auto found = values_.find(key);
  if (found == values_.end() && !expected.empty()) return expected;
  if (found != values_.end() && found->second != expected) return found->second;
  put(key, desired);
  return desired;
}

// nullopt: to no number, or beyond what one holds.
std::optional<int64_t> StoreValues::add(const std::string& key,
                                        int64_t number) {
  int64_t before = 0;
  if (const auto found = values_.find(key); found != values_.end()) {
    const std::string& text = found->second;
    const char* const end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, before);
    if (read.ptr != end || read.ec != std::errc()) return std::nullopt;
  }
  int64_t sum = 0;
  if (__builtin_add_overflow(before, number, &sum)) return std::nullopt;
  put(key, std::to_string(sum));
  return sum;
}

}  // namespace tessera::launch::detail

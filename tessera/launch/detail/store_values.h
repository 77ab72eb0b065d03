// What the store of a job with a token holds, and what it answers to a request
// that is one: no sockets here.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/launch/detail/store_messages.h"

namespace tessera::launch::detail {

class StoreValues {
 public:
  // A request that is answered when its keys are there, or its time is over.
  struct Wait {
    std::vector<std::string> keys;
    std::chrono::steady_clock::time_point end;
    bool gets = false;  // the value of the one key
    size_t found = 0;   // of the keys, when it was last looked
  };
  using Outcome = std::variant<MessageWriter, Wait>;

  // nullopt: no request is like that.
  std::optional<Outcome> hear(std::string_view message);
  // The answer, once there is one.
  std::optional<MessageWriter> answer_to(Wait& wait) const;
  // Whether a key has come since it was last asked.
  bool has_news() { return std::exchange(has_news_, false); }

 private:
  bool are_there(const std::vector<std::string>& keys) const;
  void put(const std::string& key, std::string value);
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired);
  std::optional<int64_t> add(const std::string& key, int64_t number);

  std::unordered_map<std::string, std::string> values_;
  bool has_news_ = false;
};

}  // namespace tessera::launch::detail

#include "tessera/comm/base/patient_store.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <thread>

namespace tessera::comm {

bool await_keys(c10d::Store& store, const std::vector<std::string>& keys,
                std::chrono::milliseconds time) {
  constexpr auto kLongestPause = std::chrono::milliseconds(20);
  const auto end = std::chrono::steady_clock::now() + time;
  auto pause = std::chrono::milliseconds(1);
  while (!store.check(keys)) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return true;
}

std::vector<uint8_t> PatientStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<uint8_t>> PatientStore::multiGet(
    const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

void PatientStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void PatientStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  if (await_keys(*this, keys, timeout)) return;
  C10_THROW_ERROR(DistStoreError,
                  c10::str("waited ", timeout.count(), " ms for ",
                           c10::Join(", ", keys), ", in vain"));
}

}  // namespace tessera::comm

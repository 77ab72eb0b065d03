#include "tessera/comm/base/patient_store.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <thread>

namespace tessera::comm {

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
  constexpr auto kLongestPause = std::chrono::milliseconds(20);
  const auto end = std::chrono::steady_clock::now() + timeout;
  auto pause = std::chrono::milliseconds(1);
  while (!check(keys)) {
    if (std::chrono::steady_clock::now() >= end) {
      C10_THROW_ERROR(DistStoreError,
                      c10::str("waited ", timeout.count(), " ms for ",
                               c10::Join(", ", keys), ", in vain"));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

}  // namespace tessera::comm

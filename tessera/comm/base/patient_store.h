// A part of a store whose waits leave its connection to others.
//
// c10d's client of a store asks one question at a time, and a wait is one:
// while a library waits there for a peer, nobody else of the process is
// answered. Here a wait asks again and again.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera::comm {

// Whether the keys are there within `time`: asks again and again. (A TCPStore
// that is told to wait also prints a warning whenever the time is up.)
bool await_keys(c10d::Store& store, const std::vector<std::string>& keys,
                std::chrono::milliseconds time);

class PatientStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  // Throws c10::DistStoreError where time is up.
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
};

}  // namespace tessera::comm

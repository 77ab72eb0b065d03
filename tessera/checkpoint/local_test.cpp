#include "tessera/checkpoint/local.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "tessera/checkpoint/detail/local_steps.h"
#include "tessera/checkpoint/detail/test_state.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::run_threads;
using detail::names_in;
using ::testing::HasSubstr;

using Hosts = std::vector<std::string>;  // of each rank

const Hosts kTwo = {"a", "a", "b", "b"};
const Hosts kThree = {"a", "b", "b", "c"};

// Hosts are threads that have folders of their own.
class LocalCheckpointsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSeed = 7;

  void SetUp() override { fs::create_directories(dir_); }

  std::string local_dir(const std::string& host) const {
    return temporary_.file("host-" + host);
  }
  LocalPlace place(const std::string& host) const {
    return {.local_dir = local_dir(host), .checkpoints = dir_};
  }
  std::string folder(const std::string& host) const {
    return detail::folder_of_id(local_dir(host),
                                detail::read_local_id(dir_).id);
  }
  std::string step_folder(const std::string& host, int64_t step) const {
    return folder(host) + "/step-" + std::to_string(step);
  }

  using Work = std::function<void(LocalCheckpoints&, Communicator&)>;
  void on(const Hosts& hosts, const Work& work) {
    run_threads(std::ssize(hosts), "shm", [&](Communicator& all) {
      LocalCheckpoints local(place(hosts[all.rank()]), all.world(), hosts);
      work(local, all);
    });
  }

  void save_on(const Hosts& hosts, std::vector<int64_t> steps) {
    on(hosts, [&](LocalCheckpoints& local, Communicator& all) {
      for (const int64_t step : steps) {
        local.save(step, detail::test_state(step, kSeed, all.rank(),
                                            all.world_size()));
      }
    });
  }

  // In the folder of the run.
  void save_there(int64_t step) {
    run_threads(1, "shm", [&](Communicator& all) {
      save(dir_, step, detail::test_state(step, 0, 0, 1), all.world());
    });
  }

  // The step that these ranks go on from, which have all its bits; their boxes
  // are others.
  std::optional<int64_t> newest_on(const Hosts& hosts, uint64_t seed = 31) {
    std::vector<std::optional<int64_t>> steps(hosts.size());
    on(hosts, [&](LocalCheckpoints& local, Communicator& all) {
      State state = detail::empty_state(seed, all.rank(), all.world_size());
      auto& step = steps[all.rank()] = local.load_newest(state);
      if (step) {
        EXPECT_EQ(detail::first_difference(state, *step), "");
      }
    });
    for (const auto& step : steps) EXPECT_EQ(step, steps[0]);
    return steps[0];
  }

  TemporaryFolder temporary_;
  const std::string dir_ = temporary_.file("checkpoints");
};

TEST_F(LocalCheckpointsTest, TheNewestOneIsThereOnEveryHost) {
  save_on(kTwo, {4, 5});
  for (const char* host : {"a", "b"}) {
    EXPECT_EQ(detail::local_steps(folder(host)).size(), 1U);
    const auto manifest = read_manifest(step_folder(host, 5));  // of all files
    EXPECT_EQ(manifest.step, 5);
    for (const auto& file : manifest.files) {
      verify_file(step_folder(host, 5), manifest, file);
    }
    EXPECT_EQ(newest_local_checkpoint(place(host)), step_folder(host, 5));
  }
  EXPECT_EQ(newest_on(kTwo), 5);
}

TEST_F(LocalCheckpointsTest, OfThreeHostsEachHasItsFilesAndThoseBefore) {
  save_on(kThree, {3});
  const auto files_of = [&](const char* host) {
    auto names = names_in(step_folder(host, 3));
    std::erase(names, kManifestName);
    return names;
  };
  const auto names = [](std::vector<int64_t> ranks) {
    std::vector<std::string> of;
    for (const int64_t rank : ranks) of.push_back(shard_name(rank));
    return of;
  };
  EXPECT_EQ(files_of("a"), names({0, 3}));
  EXPECT_EQ(files_of("b"), names({0, 1, 2}));
  EXPECT_EQ(files_of("c"), names({1, 2, 3}));
}

TEST_F(LocalCheckpointsTest, AnyHostMayBeLost) {
  for (const char* lost : {"a", "b", "c"}) {
    save_on(kThree, {3});
    fs::remove_all(local_dir(lost));
    EXPECT_EQ(newest_on(kThree), 3) << lost;
    // What it needs is there again.
    EXPECT_EQ(newest_local_checkpoint(place(lost)), step_folder(lost, 3));
  }
}

// What the one that was lost had is in two places again before the next save.
TEST_F(LocalCheckpointsTest, ThenAnotherOneMayBeLost) {
  save_on(kTwo, {3});
  fs::remove_all(local_dir("a"));
  EXPECT_EQ(newest_on(kTwo, kSeed), 3);
  fs::remove_all(local_dir("b"));
  EXPECT_EQ(newest_on(kTwo, kSeed), 3);
}

TEST_F(LocalCheckpointsTest, AHostAndTheNextOneMayNot) {
  save_on(kThree, {3});
  fs::remove_all(local_dir("b"));
  fs::remove_all(local_dir("c"));
  EXPECT_EQ(newest_on(kThree), std::nullopt);
}

TEST_F(LocalCheckpointsTest, OtherRanksGoOnFromIt) {
  save_on(kTwo, {8});
  EXPECT_EQ(newest_on({"b"}), 8);
  EXPECT_EQ(newest_on({"new", "b", "a"}), 8);
  EXPECT_EQ(newest_on({"new", "newer", "b"}), 8);
}

TEST_F(LocalCheckpointsTest, DamageOnOneHostIsMadeUpForByAnother) {
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 40; ++trial) {
    save_on(kTwo, {2});
    const std::string host = trial % 2 == 0 ? "a" : "b";
    const auto names = names_in(step_folder(host, 2));
    const std::string path =
        step_folder(host, 2) + "/" + names[random() % names.size()];
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<int64_t>(random() % fs::file_size(path));
    file.seekg(at);
    const auto byte = static_cast<char>(file.get() ^ (1 << (random() % 8)));
    file.seekp(at);
    file.put(byte);
    file.close();
    EXPECT_EQ(newest_on(kTwo), 2) << path << " byte " << at;
  }
}

TEST_F(LocalCheckpointsTest, DamageInBothPlacesIsFound) {
  save_on(kTwo, {2});
  for (const char* host : {"a", "b"}) {
    fs::resize_file(step_folder(host, 2) + "/" + shard_name(1), 100);
  }
  EXPECT_EQ(newest_on(kTwo), std::nullopt);
}

TEST_F(LocalCheckpointsTest, AnInterruptedSaveIsNone) {
  save_on(kThree, {5});
  // As if hosts b and c had died before they had the manifest of step 6.
  for (const char* host : {"a", "b", "c"}) {
    fs::copy(step_folder(host, 5), temporary_.file(std::string("kept-") + host),
             fs::copy_options::recursive);
  }
  save_on(kThree, {6});
  for (const char* host : {"a", "b", "c"}) {
    fs::copy(temporary_.file(std::string("kept-") + host), step_folder(host, 5),
             fs::copy_options::recursive);
  }
  const std::string of_b = step_folder("b", 6) + "/" + kManifestName;
  const std::string manifest = read_file(of_b);
  fs::remove(of_b);
  fs::remove(step_folder("c", 6) + "/" + kManifestName);
  EXPECT_EQ(newest_on(kThree), 5);
  write_file_atomic(of_b, manifest);
  EXPECT_EQ(newest_on(kThree), 6);  // a and b have all of it
  save_on(kThree, {7});
  for (const char* host : {"a", "b", "c"}) {
    EXPECT_THAT(names_in(folder(host)),
                ::testing::Not(
                    ::testing::Contains(::testing::AnyOf("step-5", "step-6"))));
  }
}

TEST_F(LocalCheckpointsTest, ASaveThatFailsLeavesTheOneBefore) {
  save_on(kTwo, {5});
  on(kTwo, [&](LocalCheckpoints& local, Communicator& all) {
    // On one host something is in the way.
    if (all.rank() == 3) std::ofstream(local.folder() + "/step-6") << "x";
    all.world().barrier();
    std::string told;
    try {
      local.save(6, detail::test_state(6, kSeed, all.rank(), 4));
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
      told = error.what_without_backtrace();
    }
    EXPECT_THAT(told, HasSubstr("step 6 was not saved"));
    EXPECT_THAT(told, HasSubstr("step-6"));
  });
  EXPECT_EQ(newest_on(kTwo), 5);
}

TEST_F(LocalCheckpointsTest, OnlyWhatIsNewerIsUsed) {
  save_there(10);
  save_on(kTwo, {12});
  EXPECT_EQ(newest_on(kTwo), 12);
  save_there(20);
  EXPECT_EQ(newest_on(kTwo), std::nullopt);
  save_on(kTwo, {23});
  EXPECT_EQ(newest_on(kTwo), 23);
  fs::remove_all(dir_ + "/step-20");  // somebody goes back
  EXPECT_EQ(newest_on(kTwo), std::nullopt);
}

TEST_F(LocalCheckpointsTest, WhatWasWrittenBesideItIsNotNewer) {
  save_there(10);
  save_on(kTwo, {22});  // while step 20 is being written
  save_there(20);
  EXPECT_EQ(newest_on(kTwo), 22);
  // One that cannot be read may be the one that it goes on from.
  save_on(kTwo, {24});
  std::ofstream(dir_ + "/step-20/manifest.json") << "x";
  EXPECT_EQ(newest_on(kTwo), 24);
  // But not where another came since.
  save_there(30);
  EXPECT_EQ(newest_on(kTwo), std::nullopt);
}

// As where the newest is damaged, and the run went on from the one before.
TEST_F(LocalCheckpointsTest, AnOlderStepOfThisLineIsNewer) {
  save_there(10);
  save_there(20);
  save_on(kTwo, {11});
  EXPECT_EQ(newest_on(kTwo), 11);
}

TEST_F(LocalCheckpointsTest, ACopyOfARunHasNothingInMemory) {
  save_on(kTwo, {5});
  const std::string kept = folder("a");
  const std::string copy = temporary_.file("copy");
  fs::copy(dir_, copy, fs::copy_options::recursive);
  EXPECT_FALSE(has_local_checkpoints(copy));
  run_threads(1, "shm", [&](Communicator& all) {
    LocalCheckpoints local({local_dir("a"), copy}, all.world(), {"a"});
    local.save(7, detail::test_state(7, kSeed, 0, 1));
    local.remove();
  });
  EXPECT_TRUE(fs::exists(kept));
  EXPECT_EQ(newest_on(kTwo), 5);
}

// What is there counts, and goes, also where the run was called otherwise.
TEST_F(LocalCheckpointsTest, ARunThatWasMovedHasThemStill) {
  save_on(kTwo, {5});
  const std::string moved = temporary_.file("moved");
  fs::rename(dir_, moved);
  run_threads(4, "shm", [&](Communicator& all) {
    LocalCheckpoints local({local_dir(kTwo[all.rank()]), moved}, all.world(),
                           kTwo);
    State state = detail::empty_state(31, all.rank(), 4);
    EXPECT_EQ(local.load_newest(state), 5);
    local.begin_anew();
    local.leave_other_lines();
  });
  for (const char* host : {"a", "b"}) {
    EXPECT_TRUE(fs::is_empty(local_dir(host)));
  }
}

TEST_F(LocalCheckpointsTest, TheyCanBeForgotten) {
  save_on(kTwo, {5});
  const std::string kept = folder("a");
  EXPECT_EQ(forget_local_checkpoints(dir_), kept);
  EXPECT_FALSE(has_local_checkpoints(dir_));
  EXPECT_EQ(newest_on(kTwo), std::nullopt);
  EXPECT_EQ(forget_local_checkpoints(dir_), "");
}

TEST_F(LocalCheckpointsTest, WhatWasSavedMeanwhileIsTheBase) {
  on(kTwo, [&](LocalCheckpoints& local, Communicator& all) {
    const auto at = [&](int64_t step) {
      return detail::test_state(step, kSeed, all.rank(), 4);
    };
    local.save(1, at(1));
    save(dir_, 2, at(2), all.world());
    local.base_changed();
    local.save(3, at(3));
  });
  EXPECT_EQ(read_manifest(step_folder("a", 3)).parent, 2);
  EXPECT_EQ(newest_on(kTwo), 3);
}

// Until it has saved something itself, in either place.
TEST_F(LocalCheckpointsTest, WhoGoesOnFromElsewhereLeavesThem) {
  for (const bool locally : {true, false}) {
    save_on(kTwo, {5});
    const std::string before = folder("a");
    on(kTwo, [&](LocalCheckpoints& local, Communicator& all) {
      local.begin_anew();
      all.world().barrier();
      if (all.rank() == 0) {
        EXPECT_EQ(folder("a"), before);
      }
      all.world().barrier();
      const State state = detail::test_state(2, kSeed, all.rank(), 4);
      if (locally) {
        local.save(2, state);
      } else {
        local.leave_other_lines();
        save(dir_, 2, state, all.world());
        local.base_changed();
      }
    });
    EXPECT_FALSE(fs::exists(before));
    EXPECT_EQ(newest_on(kTwo), locally ? std::optional(2) : std::nullopt);
    EXPECT_EQ(fs::is_empty(local_dir("a")), !locally);
  }
}

TEST_F(LocalCheckpointsTest, AHostThatWasAwayComesBackWithoutThem) {
  save_on(kTwo, {5});
  const std::string old = folder("b");
  on({"a"}, [&](LocalCheckpoints& local, Communicator&) {
    local.begin_anew();
    local.save(2, detail::test_state(2, kSeed, 0, 1));
  });
  EXPECT_TRUE(fs::exists(old));
  EXPECT_EQ(newest_on(kTwo), 2);
  on(kTwo, [](LocalCheckpoints& local, Communicator&) { local.remove(); });
  EXPECT_FALSE(fs::exists(old));
}

TEST_F(LocalCheckpointsTest, ARunThatEndsLeavesNothing) {
  save_on(kTwo, {5});
  on(kTwo, [](LocalCheckpoints& local, Communicator&) { local.remove(); });
  for (const char* host : {"a", "b"}) {
    EXPECT_TRUE(fs::is_empty(local_dir(host)));
  }
}

TEST_F(LocalCheckpointsTest, TwoHostsWithOneFolderAreRefused) {
  const Hosts hosts = {"a", "b"};
  run_threads(2, "shm", [&](Communicator& all) {
    std::string told;
    try {
      const LocalCheckpoints local(place("a"), all.world(), hosts);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      told = error.what_without_backtrace();
    }
    EXPECT_THAT(told, HasSubstr("is the same folder as on another host"));
  });
}

TEST_F(LocalCheckpointsTest, AFolderOfSomebodyElseIsNotUsed) {
  save_on({"a"}, {5});
  const std::string taken = folder("a");
  fs::rename(taken, temporary_.file("elsewhere"));
  fs::create_directory_symlink(temporary_.file("elsewhere"), taken);
  EXPECT_EQ(newest_on({"a"}), std::nullopt);
  EXPECT_THROW(save_on({"a"}, {6}), Error);
}

TEST_F(LocalCheckpointsTest, TheOwnerAloneReadsThem) {
  save_on({"a"}, {5});
  EXPECT_EQ(fs::status(folder("a")).permissions(), fs::perms::owner_all);
}

TEST_F(LocalCheckpointsTest, AnIdThatIsNoneIsRefused) {
  for (const char* text :
       {"", "../../etc", "ABCDEF0123456789ABCDEF0123456789"}) {
    std::ofstream(dir_ + "/local-id") << text;
    EXPECT_THROW(newest_local_checkpoint(place("a")), Error) << text;
  }
}

TEST_F(LocalCheckpointsTest, RoomIsAskedForBefore) {
  require_local_space(place("a"), 1000);
  EXPECT_THROW(require_local_space(place("a"), int64_t{1} << 60), Error);
  std::ofstream(temporary_.file("file")) << "x";
  EXPECT_THROW(require_local_space({temporary_.file("file"), dir_}, 1), Error);
}

}  // namespace
}  // namespace tessera::checkpoint

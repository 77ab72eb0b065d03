#include "tessera/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tessera/checkpoint/detail/step_folders.h"
#include "tessera/checkpoint/detail/test_state.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/reading.h"
#include "tessera/checkpoint/reshard.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::Communicator;
using comm::run_threads;
using detail::names_in;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The message of the Error that `work` ends in; "" if it does not.
std::string refusal(ExitCode code, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), code) << error.what_without_backtrace();
    return error.what_without_backtrace();
  }
  return "";
}

class CheckpointTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSeed = 7;  // of the layout that tests save with

  void save_on(int64_t ranks, int64_t step, uint64_t seed = kSeed,
               const SaveOptions& options = {}) {
    run_threads(ranks, "shm", [&](Communicator& all) {
      const State state = detail::test_state(step, seed, all.rank(), ranks);
      save(folder_, step, state, all.world(), options);
    });
  }

  // Loads the newest on so many ranks; the step, when all its bits are there.
  std::optional<int64_t> latest_on(int64_t ranks, uint64_t seed = kSeed) {
    std::vector<std::optional<int64_t>> steps(ranks);
    run_threads(ranks, "shm", [&](Communicator& all) {
      State state = detail::empty_state(seed, all.rank(), ranks);
      steps[all.rank()] = load_latest(folder_, state, all.world());
      if (!steps[all.rank()]) return;
      EXPECT_EQ(detail::first_difference(state, *steps[all.rank()]), "");
    });
    for (const auto& step : steps) EXPECT_EQ(step, steps[0]);
    return steps[0];
  }

  // What loading this step on one rank says; "" when it is good.
  std::string verdict(int64_t step) {
    std::string text;
    run_threads(1, "shm", [&](Communicator& all) {
      State state = detail::empty_state(0, 0, 1);
      text = refusal(ExitCode::kInputOutput,
                     [&] { load(step_path(step), state, all.world()); });
    });
    return text;
  }

  std::string step_path(int64_t step) const {
    return folder_ + "/" + detail::step_name(step);
  }

  TemporaryFolder temporary_;
  const std::string folder_ = temporary_.file("checkpoints");
};

void flip_bit(const std::string& path, int64_t bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(bit / 8);
  const auto byte = static_cast<char>(file.get() ^ (1 << (bit % 8)));
  file.seekp(bit / 8);
  file.put(byte);
}

// The tensor that this byte of the file belongs to; "" in its header.
std::string tensor_at(const std::string& path, int64_t byte) {
  const SafetensorsFile file(path);
  for (const auto& entry : file.tensors()) {
    if (byte >= entry.begin && byte < entry.end) return entry.name;
  }
  return "";
}

// As checkpoints had experts one by one: (4, 2) in files, (3, 4, 2) here, a
// part of it on each rank.
TEST_F(CheckpointTest, SlicesOfAnOlderFormAreStacked) {
  const at::Tensor whole = at::arange(24).view({3, 4, 2}).to(at::kFloat);
  run_threads(2, "shm", [&](Communicator& all) {
    State old;
    for (int64_t e = 0; e < 3; ++e) {  // the last one cut over the ranks
      if (e < 2 && all.rank() != e) continue;
      const int64_t rows = e < 2 ? 4 : 2, first = e < 2 ? 0 : 2 * all.rank();
      old.tensors.push_back({.name = "w." + std::to_string(e),
                             .global_shape = {4, 2},
                             .box = {{first, 0}, {rows, 2}},
                             .local = whole[e].narrow(0, first, rows)});
    }
    save(folder_, 1, old, all.world());
    const mesh::Box box{{1 - all.rank(), 1, 0}, {2, 2, 2}};
    State state;
    state.tensors.push_back({.name = "w",
                             .global_shape = {3, 4, 2},
                             .box = box,
                             .local = at::zeros(box.size),
                             .slices = {"w.0", "w.1", "w.2"}});
    EXPECT_EQ(load(step_path(1), state, all.world()), 1);
    EXPECT_TRUE(at::equal(state.tensors[0].local,
                          whole.narrow(0, box.offset[0], 2).narrow(1, 1, 2)));
    state.tensors[0].slices = {"w.0", "w.1", "w.3"};
    EXPECT_THAT(refusal(ExitCode::kConfig,
                        [&] { load(step_path(1), state, all.world()); }),
                AllOf(HasSubstr("not in the checkpoint: w.3"),
                      HasSubstr("not in the model: w.2")));
  });
}

// Of a narrow type once, and beside it as an optimizer has it.
TEST_F(CheckpointTest, WhatIsWiderHereIsReadFromWhatIsFinerThere) {
  const at::Tensor fine = at::rand({4, 2}, at::kFloat);
  const auto entry = [](const std::string& name, const at::Tensor& local) {
    return TensorEntry{.name = name,
                       .global_shape = {4, 2},
                       .box = mesh::Box::whole({4, 2}),
                       .local = local};
  };
  run_threads(1, "shm", [&](Communicator& all) {
    save(folder_, 1,
         {.tensors = {entry("w", fine.to(at::kBFloat16)), entry("m.w", fine)}},
         all.world());
    State state{.tensors = {entry("w", at::zeros({4, 2}))}};
    state.tensors[0].finer = "m.w";
    load(step_path(1), state, all.world());
    EXPECT_TRUE(at::equal(state.tensors[0].local, fine));
    state.tensors = {entry("w", at::zeros({4, 2}, at::kBFloat16)),
                     entry("m.w", at::zeros({4, 2}))};
    state.tensors[0].finer = "m.w";
    load(step_path(1), state, all.world());
    EXPECT_TRUE(at::equal(state.tensors[0].local, fine.to(at::kBFloat16)));
  });
}

TEST_F(CheckpointTest, TensorsAreReadOneByOneWithoutMemoryForAll) {
  save_on(3, 5);
  run_threads(1, "shm", [&](Communicator& all) {
    State whole = detail::empty_state(0, 0, 1);
    load(step_path(5), whole, all.world());
    State wanted = whole;
    for (auto& tensor : wanted.tensors) {
      tensor.local = at::empty({0}, tensor.local.options());
    }
    const TensorReader reader(step_path(5), wanted);
    const std::string kept = folder_ + "/kept";
    fs::rename(step_path(5), kept);  // as good as gone
    for (const auto& tensor : whole.tensors) {
      EXPECT_TRUE(at::equal(reader.read(tensor.name, tensor.box), tensor.local))
          << tensor.name;
      mesh::Box part = tensor.box;
      if (part.size.empty() || part.size[0] < 2) continue;
      part.offset[0] += 1;
      part.size[0] -= 1;
      EXPECT_TRUE(at::equal(reader.read(tensor.name, part),
                            tensor.local.narrow(0, 1, part.size[0])))
          << tensor.name;
    }
    fs::rename(kept, step_path(5));
    const std::string file = step_path(5) + "/" + names_in(step_path(5)).back();
    const auto bits = static_cast<int64_t>(8 * fs::file_size(file));
    flip_bit(file, bits - 1);
    const std::string said = refusal(ExitCode::kInputOutput, [&] {
      for (const auto& tensor : whole.tensors) {
        reader.read(tensor.name, tensor.box);
      }
    });
    EXPECT_THAT(said, AllOf(HasSubstr(file), HasSubstr("writes to it")));
    flip_bit(file, bits - 1);
    wanted.tensors[0].name = "another";
    EXPECT_THAT(
        refusal(ExitCode::kConfig, [&] { TensorReader(step_path(5), wanted); }),
        HasSubstr("not in the checkpoint: another"));
    fs::resize_file(file, fs::file_size(file) - 1);
    EXPECT_THAT(refusal(ExitCode::kInputOutput,
                        [&] { TensorReader(step_path(5), whole); }),
                HasSubstr(file));
  });
}

TEST_F(CheckpointTest, AnyLayoutLoadsOnAnyOther) {
  std::mt19937_64 random(20240607);
  for (int64_t trial = 1; trial <= 24; ++trial) {
    const auto saving = static_cast<int64_t>(random() % 4) + 1;
    const auto loading = static_cast<int64_t>(random() % 4) + 1;
    save_on(saving, trial, random() % 100 + 1);
    EXPECT_EQ(latest_on(loading, random() % 100 + 1), trial)
        << saving << " ranks to " << loading;
  }
}

TEST_F(CheckpointTest, AsOtherRanksWouldHaveWrittenItItHoldsTheSame) {
  save_on(3, 5);
  const auto rewritten = [&](int64_t ranks) {
    const std::string folder = temporary_.file(std::to_string(ranks));
    EXPECT_EQ(reshard(step_path(5), folder, ranks), 5);
    run_threads(ranks, "shm", [&](Communicator& all) {
      State state = detail::empty_state(11, all.rank(), ranks);
      EXPECT_EQ(load_latest(folder, state, all.world()), 5);
      EXPECT_EQ(detail::first_difference(state, 5), "");
    });
    return read_manifest(folder + "/step-5");
  };
  const Manifest before = read_manifest(step_path(5));
  for (const int64_t ranks : {1, 2, 5}) {
    const Manifest manifest = rewritten(ranks);
    EXPECT_EQ(manifest.tensors, before.tensors);
    EXPECT_EQ(manifest.extra, before.extra);
    EXPECT_LE(std::ssize(manifest.files), ranks);
    EXPECT_EQ(manifest.world_size, ranks);
  }
  const std::string file = step_path(5) + "/" + before.files[0].name;
  flip_bit(file, 8 * (before.files[0].bytes - 1));
  EXPECT_NE(refusal(ExitCode::kInputOutput, [&] { rewritten(4); }), "");
  EXPECT_FALSE(fs::exists(temporary_.file("4") + "/step-5"));
}

TEST_F(CheckpointTest, TheFolderHoldsWhatTheFormatSays) {
  save_on(2, 3, kSeed, {.keep = 2, .mesh = "dp_shard 2"});
  EXPECT_THAT(names_in(folder_), ::testing::ElementsAre("latest", "step-3"));
  EXPECT_EQ(read_file(folder_ + "/latest"), "step-3\n");
  const Manifest manifest = read_manifest(step_path(3));
  EXPECT_EQ(manifest.step, 3);
  EXPECT_EQ(manifest.world_size, 2);
  EXPECT_EQ(manifest.mesh, "dp_shard 2");
  EXPECT_EQ(manifest.extra, "{\"step\":3}");
  EXPECT_EQ(manifest.tensors.size(), detail::test_tensors().size());
  EXPECT_EQ(manifest.parent, std::nullopt);
  // What is parsed is what was written, to the byte.
  const std::string text = read_file(step_path(3) + "/manifest.json");
  EXPECT_EQ(format_manifest(parse_manifest(text, "here")), text);
  const SafetensorsFile shard(step_path(3) + "/" + shard_name(0));
  EXPECT_EQ(shard.metadata().at("format"), "pt");
  EXPECT_THAT(shard.metadata().at("DCP_SHARDING_INFO"),
              HasSubstr("\"saved_offsets\":[0"));
}

TEST_F(CheckpointTest, BesideTrainingWhatWasThereAtTheCallIsSaved) {
  save_on(3, 1);
  run_threads(3, "shm", [&](Communicator& all) {
    State state = detail::test_state(2, kSeed, all.rank(), 3);
    BackgroundSave beside(folder_, 2, state, all.world(), {.keep = 1});
    for (TensorEntry& entry : state.tensors) entry.local.fill_(77);
    while (!beside.is_written()) std::this_thread::yield();
    EXPECT_EQ(beside.step(), 2);
    all.world().barrier();
    EXPECT_EQ(read_file(folder_ + "/latest"), "step-1\n");
    all.world().barrier();
    beside.finish();
  });
  EXPECT_THAT(names_in(folder_), ::testing::ElementsAre("latest", "step-2"));
  EXPECT_EQ(latest_on(2), 2);
  EXPECT_EQ(read_manifest(step_path(2)).parent, 1);
}

TEST_F(CheckpointTest, BesideTrainingWhatIsNotFinishedIsNone) {
  save_on(2, 1);
  run_threads(2, "shm", [&](Communicator& all) {
    const State state = detail::test_state(2, kSeed, all.rank(), 2);
    const BackgroundSave given_up(folder_, 2, state, all.world());
  });
  EXPECT_EQ(latest_on(2), 1);
  save_on(2, 3);
  EXPECT_THAT(names_in(folder_),
              ::testing::ElementsAre("latest", "step-1", "step-3"));
}

// Of a best one that could not be saved.
TEST_F(CheckpointTest, TheBestThatStandsStaysUntilABetterOneDoes) {
  save_on(1, 1, kSeed, {.keep = 1, .best = 1});
  save_on(1, 3, kSeed, {.keep = 1, .best = 2});
  save_on(1, 4, kSeed, {.keep = 1, .best = 2});
  EXPECT_THAT(names_in(folder_),
              ::testing::ElementsAre("best", "latest", "step-1", "step-4"));
  EXPECT_EQ(read_file(folder_ + "/best"), "step-1\n");
  save_on(1, 5, kSeed, {.keep = 1, .best = 5});
  save_on(1, 6, kSeed, {.keep = 1});
  EXPECT_THAT(names_in(folder_), ::testing::ElementsAre("latest", "step-6"));
}

TEST_F(CheckpointTest, NoCheckpointIsNoError) {
  EXPECT_EQ(latest_on(2), std::nullopt);
  fs::create_directories(folder_ + "/step-5.tmp");
  fs::create_directories(folder_ + "/step-05");
  EXPECT_EQ(latest_on(1), std::nullopt);
  fs::create_directories(folder_ + "/step-20.bak");  // set aside
  EXPECT_FALSE(has_checkpoints(folder_));
  EXPECT_FALSE(has_checkpoints(folder_ + "/missing"));
  EXPECT_EQ(newest_commit(folder_), -1);
  save_on(1, 2);
  EXPECT_TRUE(has_checkpoints(folder_));
}

TEST_F(CheckpointTest, NamesThatARunTakesForItsOwn) {
  for (const char* own : {"step-5", "step-5.tmp", "rewound.tmp-17-0"}) {
    EXPECT_TRUE(is_of_checkpoints(own)) << own;
  }
  for (const char* other : {"step-5.bak", "step-05", "whole", "rewound"}) {
    EXPECT_FALSE(is_of_checkpoints(other)) << other;
  }
}

TEST_F(CheckpointTest, OldOnesGoWhenTheNewOneIsThere) {
  for (const int64_t step : {2, 4, 6, 8}) save_on(1, step);
  EXPECT_THAT(names_in(folder_),
              ::testing::ElementsAre("latest", "step-6", "step-8"));
  EXPECT_EQ(read_manifest(step_path(8)).parent, 6);
  fs::create_directories(folder_ + "/step-9.tmp");
  std::ofstream(folder_ + "/step-9.tmp/shard") << "half";
  std::ofstream(folder_ + "/rewound.tmp-17-0") << "half";
  save_on(1, 10, kSeed, {.keep = 0});
  EXPECT_THAT(names_in(folder_),
              ::testing::ElementsAre("latest", "step-10", "step-6", "step-8"));
}

TEST_F(CheckpointTest, OldOnesGoAlsoWhereTheNewOneCannotBeNamed) {
  save_on(1, 1);
  fs::remove(folder_ + "/latest");
  fs::create_directories(folder_ + "/latest/somebody's");
  save_on(1, 2, kSeed, {.keep = 1});
  EXPECT_FALSE(fs::exists(step_path(1)));
  EXPECT_EQ(latest_on(1), 2);
}

TEST_F(CheckpointTest, InACheckpointNothingIsSaved) {
  save_on(1, 1);
  run_threads(2, "shm", [&](Communicator& all) {
    const State state = detail::test_state(2, kSeed, all.rank(), 2);
    EXPECT_THAT(refusal(ExitCode::kInputOutput,
                        [&] { save(step_path(1), 2, state, all.world()); }),
                HasSubstr("step-1 is a checkpoint itself"));
  });
  EXPECT_EQ(latest_on(1), 1);
}

TEST_F(CheckpointTest, AStepThatIsThereIsReplacedWholeAndBecomesTheNewest) {
  save_on(2, 4);
  save_on(2, 8);
  // Resumed from 4, another course: the newest is what was saved last.
  save_on(3, 6, 11, {.keep = 0});
  EXPECT_EQ(latest_on(2), 6);
  save_on(1, 4, 13, {.keep = 0});
  EXPECT_EQ(read_manifest(step_path(4)).world_size, 1);
  EXPECT_EQ(latest_on(2), 4);
  EXPECT_THAT(names_in(folder_),
              ::testing::ElementsAre("latest", "step-4", "step-6", "step-8"));
}

TEST_F(CheckpointTest, OneThatARunWentBackToIsTheNewestUntilItSavesAgain) {
  for (const int64_t step : {2, 4, 6}) save_on(1, step, kSeed, {.keep = 0});
  go_back_to(folder_, 2);
  EXPECT_EQ(latest_on(1), 2);
  EXPECT_EQ(read_file(folder_ + "/latest"), "step-2\n");
  EXPECT_EQ(read_file(folder_ + "/resumed-from"), "step-2 2\n");
  save_on(1, 5, kSeed, {.keep = 0});
  EXPECT_EQ(latest_on(1), 5);
  EXPECT_EQ(read_manifest(step_path(5)).parent, 2);
  // The other branch goes first, whatever its steps.
  save_on(1, 7, kSeed, {.keep = 3});
  EXPECT_THAT(names_in(folder_),
              ::testing::ElementsAre("latest", "resumed-from", "step-2",
                                     "step-5", "step-7"));
  // Saved again, it is newer than that it was gone back to.
  save_on(1, 2, kSeed, {.keep = 0});
  EXPECT_EQ(latest_on(1), 2);
  save_on(1, 9, kSeed, {.keep = 0});
  EXPECT_EQ(latest_on(1), 9);
  go_back_to(folder_, 9);  // nothing to go back from
  EXPECT_EQ(read_file(folder_ + "/resumed-from"), "step-2 2\n");

  for (const char* text : {"", "step-2", "2 2", "step-2 x", "step-2 2 3"}) {
    std::ofstream(folder_ + "/resumed-from") << text;
    EXPECT_THAT(
        refusal(ExitCode::kInputOutput, [&] { list_checkpoints(folder_); }),
        ::testing::HasSubstr("/resumed-from: must be"));
  }
}

TEST_F(CheckpointTest, EveryFlippedBitIsFoundAndItsTensorNamed) {
  save_on(3, 5);
  std::vector<std::string> files;
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (const std::string& name : names_in(step_path(5))) {
    files.push_back(step_path(5) + "/" + name);
    total += static_cast<int64_t>(fs::file_size(files.back()));
    ends.push_back(total);
  }
  std::mt19937_64 random(5);
  int64_t tensors_named = 0;
  run_threads(1, "shm", [&](Communicator& all) {
    for (int trial = 0; trial < 500; ++trial) {
      const auto byte = static_cast<int64_t>(random() % total);
      const size_t at = std::ranges::upper_bound(ends, byte) - ends.begin();
      const int64_t place = byte - (at == 0 ? 0 : ends[at - 1]);
      const std::string tensor = files[at].ends_with(".safetensors")
                                     ? tensor_at(files[at], place)
                                     : "";
      const int64_t bit = place * 8 + static_cast<int64_t>(random() % 8);
      flip_bit(files[at], bit);
      State state = detail::empty_state(0, 0, 1);
      const std::string said = refusal(ExitCode::kInputOutput, [&] {
        load(step_path(5), state, all.world());
      });
      EXPECT_THAT(said, AllOf(HasSubstr(files[at]), HasSubstr(tensor)));
      if (!tensor.empty()) ++tensors_named;
      flip_bit(files[at], bit);
    }
  });
  EXPECT_GT(tensors_named, 50);
  EXPECT_EQ(verdict(5), "");
}

TEST_F(CheckpointTest, EveryTruncationIsFound) {
  save_on(3, 5);
  std::mt19937_64 random(6);
  run_threads(1, "shm", [&](Communicator& all) {
    const auto names = names_in(step_path(5));
    for (int trial = 0; trial < 50; ++trial) {
      const std::string path = step_path(5) + "/" + names[trial % names.size()];
      const std::string content = read_file(path);
      const auto size = static_cast<int64_t>(random() % content.size());
      const std::string tensor =
          path.ends_with(".safetensors") ? tensor_at(path, size) : "";
      fs::resize_file(path, size);
      State state = detail::empty_state(0, 0, 1);
      const std::string said = refusal(ExitCode::kInputOutput, [&] {
        load(step_path(5), state, all.world());
      });
      EXPECT_THAT(said, AllOf(HasSubstr(path), HasSubstr(tensor)));
      std::ofstream(path, std::ios::binary) << content;
    }
  });
  EXPECT_EQ(verdict(5), "");
}

TEST_F(CheckpointTest, FilesThatDoNotBelongOrAreNotThereAreNamed) {
  save_on(3, 5);
  save_on(3, 6);
  const std::string shard = step_path(6) + "/" + shard_name(1);
  const std::string content = read_file(shard);
  const auto restore = [&] {
    std::ofstream(shard, std::ios::binary) << content;
  };
  ASSERT_EQ(verdict(6), "");

  fs::remove(shard);
  EXPECT_THAT(verdict(6), AllOf(HasSubstr(shard), HasSubstr("is missing")));
  std::ofstream(shard).close();
  EXPECT_THAT(verdict(6), AllOf(HasSubstr(shard), HasSubstr("truncated")));
  std::ofstream(shard, std::ios::binary) << content << "x";
  EXPECT_THAT(verdict(6), AllOf(HasSubstr(shard), HasSubstr("bytes, not")));
  fs::remove(shard);
  fs::copy_file(step_path(5) + "/" + shard_name(1), shard);
  EXPECT_THAT(verdict(6), AllOf(HasSubstr(shard), HasSubstr("tensor \"")));
  fs::remove(shard);
  fs::copy_file(step_path(6) + "/" + shard_name(0), shard);
  EXPECT_THAT(verdict(6), HasSubstr(shard));
  restore();

  const std::string extra = step_path(6) + "/" + shard_name(7);
  std::ofstream(extra, std::ios::binary) << content;
  EXPECT_THAT(verdict(6), AllOf(HasSubstr(extra), HasSubstr("not listed")));
  fs::remove(extra);
  fs::copy(step_path(6), step_path(9));
  EXPECT_THAT(verdict(9), HasSubstr("is of step 6"));
  fs::remove(step_path(6) + "/manifest.json");
  EXPECT_THAT(verdict(6), HasSubstr("manifest.json"));
  EXPECT_THAT(verdict(77), HasSubstr("step-77"));
}

TEST_F(CheckpointTest, AllRanksFallBackToTheSameOlderOne) {
  save_on(3, 5);
  save_on(3, 6, kSeed, {.keep = 0});
  save_on(3, 7, kSeed, {.keep = 0});
  // Only the rank that reads this part sees it, and none may go on with it.
  const std::string shard = step_path(7) + "/" + shard_name(2);
  flip_bit(shard, static_cast<int64_t>(fs::file_size(shard)) * 8 - 3);
  flip_bit(step_path(6) + "/manifest.json", 99);
  EXPECT_EQ(latest_on(3), 5);
  EXPECT_EQ(latest_on(2, 5), 5);

  flip_bit(step_path(5) + "/" + shard_name(0), 70);
  run_threads(2, "shm", [&](Communicator& all) {
    State state = detail::empty_state(kSeed, all.rank(), 2);
    EXPECT_THAT(refusal(ExitCode::kInputOutput,
                        [&] { load_latest(folder_, state, all.world()); }),
                HasSubstr("none of the 3"));
  });
}

TEST_F(CheckpointTest, ACheckpointOfAnotherModelIsRefusedWithTheDifference) {
  save_on(2, 5);
  run_threads(2, "shm", [&](Communicator& all) {
    const auto said = [&](const auto& change, const LoadOptions& options) {
      State state = detail::empty_state(0, all.rank(), 2);
      change(state);
      return refusal(ExitCode::kConfig, [&] {
        load_latest(folder_, state, all.world(), options);
      });
    };
    const auto rename = [](State& state) { state.tensors[0].name = "w"; };
    EXPECT_THAT(said(rename, {}),
                AllOf(HasSubstr("not in the checkpoint: w"),
                      HasSubstr("not in the model: model.embed.weight")));
    // Only rank 1 asks for another shape; both hear of it.
    const auto reshape = [&](State& state) {
      if (all.rank() == 0) return;
      state.tensors[2].global_shape = {7};
      state.tensors[2].box.size = {7};
      state.tensors[2].local = at::zeros({7});
    };
    EXPECT_THAT(said(reshape, {}),
                HasSubstr("model.norm.weight (F32 [6] saved, F32 [7] here)"));
    const auto widen = [](State& state) {
      state.tensors[2].local = state.tensors[2].local.to(at::kDouble);
    };
    EXPECT_THAT(said(widen, {}), HasSubstr("F32 [6] saved, F64 [6] here"));
    EXPECT_EQ(said(widen, {.convert = true}), "");
    const auto fewer = [](State& state) { state.tensors.pop_back(); };
    EXPECT_THAT(said(fewer, {}), HasSubstr("not in the model: buffer.bytes"));
    EXPECT_EQ(said(fewer, {.partial = true}), "");
  });
}

TEST_F(CheckpointTest, ATensorThatNobodyOwnsOrTwoDoIsNeverSaved) {
  for (const bool twice : {true, false}) {
    run_threads(2, "shm", [&](Communicator& all) {
      State state = detail::test_state(1, 0, all.rank(), 2);
      state.tensors[2].owned = twice;
      EXPECT_THAT(refusal(ExitCode::kInputOutput,
                          [&] { save(folder_, 1, state, all.world()); }),
                  AllOf(HasSubstr("model.norm.weight"),
                        HasSubstr("step 1 was not saved")));
    });
    EXPECT_THAT(names_in(folder_), ::testing::IsEmpty());
  }
}

// A manifest with a right seal that lies all the same.
TEST_F(CheckpointTest, AManifestThatLiesIsRefused) {
  save_on(2, 5);
  const Manifest good = read_manifest(step_path(5));
  const auto said = [&](const std::function<void(Manifest&)>& change) {
    Manifest bad = good;
    change(bad);
    std::ofstream(step_path(5) + "/manifest.json", std::ios::binary)
        << format_manifest(bad);
    return verdict(5);
  };
  EXPECT_EQ(said([](Manifest&) {}), "");
  EXPECT_THAT(said([](Manifest& m) { m.step = 6; }), HasSubstr("is of step 6"));
  EXPECT_THAT(said([](Manifest& m) { m.step = -5; }), HasSubstr("negative"));
  for (const char* name : {"../../../etc/passwd", "/etc/passwd", "", "x",
                           "shard-00001/-model-00001-of-00001.safetensors"}) {
    EXPECT_THAT(said([&](Manifest& m) { m.files[0].name = name; }),
                HasSubstr("not a name of this format"));
  }
  EXPECT_THAT(said([](Manifest& m) { m.files[1].name = m.files[0].name; }),
              HasSubstr("is there twice"));
  EXPECT_THAT(said([](Manifest& m) { m.files.pop_back(); }),
              HasSubstr("elements"));
  EXPECT_THAT(said([](Manifest& m) { m.files[0].bytes += 8; }),
              HasSubstr("end at byte"));
  EXPECT_THAT(said([](Manifest& m) { m.files[0].boxes[0].sums.end += 8; }),
              HasSubstr("are not the"));
  EXPECT_THAT(
      said([](Manifest& m) { m.files[0].boxes[0].box.offset[0] = 900; }),
      HasSubstr("do not lie in"));
  EXPECT_THAT(said([](Manifest& m) { m.tensors.push_back(m.tensors[0]); }),
              HasSubstr("is there twice"));
  EXPECT_THAT(said([](Manifest& m) {
                m.tensors.push_back({"z", at::kFloat, {1LL << 40, 1LL << 40}});
              }),
              HasSubstr("overflows"));
  EXPECT_THAT(
      said([](Manifest& m) { m.tensors.push_back({"z", at::kFloat, {4}}); }),
      HasSubstr("\"z\" has 0 of its 4 elements"));
  EXPECT_THAT(said([](Manifest& m) { m.files[0].hash.low ^= 1; }),
              HasSubstr("XXH3"));
  // The parts swap places within a file: the checksums are of other bytes.
  EXPECT_NE(said([](Manifest& m) {
              std::swap(m.files[0].boxes.front().sums.blocks,
                        m.files[0].boxes.back().sums.blocks);
            }),
            "");
}

TEST_F(CheckpointTest, WhatIsReadStaysUntilALaterSave) {
  const auto is_there = [&](int64_t step) {
    return std::filesystem::exists(step_folder(folder_, step));
  };
  save_on(1, 1, kSeed, {.keep = 1});
  {
    const Reading one(step_folder(folder_, 1)), other(step_folder(folder_, 1));
    save_on(1, 2, kSeed, {.keep = 1});
    EXPECT_TRUE(is_there(1));
  }
  save_on(1, 3, kSeed, {.keep = 1});
  EXPECT_FALSE(is_there(1) || is_there(2));
  EXPECT_NE(refusal(ExitCode::kInputOutput,
                    [&] { const Reading gone(step_folder(folder_, 1)); }),
            "");
}

TEST_F(CheckpointTest, RoomForCheckpointsIsAskedForBeforeARun) {
  require_space(folder_, 1000, {.keep = 2});
  require_space(folder_, 1000, {.keep = 0});
  const auto free = static_cast<int64_t>(free_bytes(folder_));
  EXPECT_THAT(refusal(ExitCode::kConfig,
                      [&] { require_space(folder_, free / 2, {.keep = 3}); }),
              AllOf(HasSubstr(folder_), HasSubstr("checkpoint.keep")));
  EXPECT_THAT(
      refusal(ExitCode::kConfig,
              [&] { require_space(folder_, INT64_MAX / 2, {.keep = 9}); }),
      HasSubstr("fit on no disk"));
  // No more than the run makes.
  require_space(folder_, free / 2, {.keep = 1'000'000'000'000}, 0, /*saves=*/1);
}

// Those beyond `keep` go behind the next save, for which there must be room.
TEST_F(CheckpointTest, TheNextOneNeedsRoomBeforeOlderOnesGo) {
  for (const int64_t step : {1, 2, 3, 4, 5})
    save_on(1, step, kSeed, {.keep = 0});
  const auto all = static_cast<int64_t>(free_bytes(folder_)) + (1 << 20);
  const auto said = refusal(ExitCode::kConfig, [&] {
    require_space(folder_, 1000, {.keep = 1}, /*others=*/all);
  });
  EXPECT_THAT(said, HasSubstr("but the next checkpoint needs 1000 B before an "
                              "older one goes. Free some, remove checkpoints"));
}

// Of a save that was killed: the next one removes it first.
TEST_F(CheckpointTest, WhatAKilledSaveLeftIsNoReasonNotToStart) {
  const std::string left = folder_ + "/step-3.tmp";
  std::filesystem::create_directories(left);
  constexpr int64_t kBytes = int64_t{8} << 20;
  write_file_atomic(left + "/shard", std::string(kBytes, 'x'));
  const auto free = static_cast<int64_t>(free_bytes(folder_));
  constexpr int64_t kSlack = int64_t{4} << 20;  // others use the disk too
  require_space(folder_, free + kSlack, {.keep = 0});
  EXPECT_NE(
      refusal(ExitCode::kConfig,
              [&] { require_space(folder_, free + 2 * kBytes, {.keep = 0}); }),
      "");
}

}  // namespace
}  // namespace tessera::checkpoint

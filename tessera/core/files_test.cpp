#include "tessera/core/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <span>
#include <thread>
#include <vector>

#include "tessera/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

size_t entries_in(const fs::path& folder) {
  return static_cast<size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

template <typename Body>
void expect_refused(Body body, const std::string& part) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kInputOutput);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << error.what();
  }
}

TEST(TemporaryFolder, IsRemovedWithAllThatIsInIt) {
  fs::path path;
  {
    const TemporaryFolder folder, other;
    path = folder.path();
    EXPECT_NE(path, other.path());
    write_file_atomic(path / "a" / "b" / "c.txt", "x");
    EXPECT_TRUE(fs::exists(path / "a/b/c.txt"));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST(TemporaryFolder, RefusesATmpdirThatIsNone) {
  const char* set = std::getenv("TMPDIR");
  const std::string before = set != nullptr ? set : "";
  setenv("TMPDIR", "/nowhere/at/all", 1);
  expect_refused([] { TemporaryFolder(); }, "Set TMPDIR");
  set != nullptr ? setenv("TMPDIR", before.c_str(), 1) : unsetenv("TMPDIR");
}

TEST(Files, WriteReplacesTheWholeFileAndLeavesNoOther) {
  const TemporaryFolder folder;
  const std::string file = folder.file("data");
  for (const std::string& content :
       {std::string("old"), std::string("\0new\n", 5), std::string(),
        std::string(3 << 20, 'x')}) {
    write_file_atomic(file, content);
    EXPECT_EQ(read_file(file), content);
    EXPECT_EQ(entries_in(folder.path()), 1);
  }
}

TEST(Files, ManyWritersLeaveOneOfTheirTexts) {
  const TemporaryFolder folder;
  const std::string file = folder.file("data");
  std::vector<std::thread> writers;
  for (char letter : {'a', 'b', 'c', 'd'}) {
    writers.emplace_back([&file, letter] {
      for (int i = 0; i < 5; ++i) {
        write_file_atomic(file, std::string(10000, letter));
      }
    });
  }
  for (auto& writer : writers) writer.join();
  const std::string content = read_file(file);
  EXPECT_EQ(content, std::string(10000, content.at(0)));
  EXPECT_EQ(entries_in(folder.path()), 1);
}

TEST(Files, AFailedWriteLeavesTheOldFile) {
  const TemporaryFolder folder;
  fs::create_directories(folder.path() / "taken" / "inside");
  expect_refused([&] { write_file_atomic(folder.path() / "taken", "x"); },
                 "taken: cannot be replaced");
  EXPECT_TRUE(fs::exists(folder.path() / "taken" / "inside"));
  EXPECT_EQ(entries_in(folder.path()), 1);
  write_file_atomic(folder.path() / "file", "x");
  expect_refused(
      [&] { write_file_atomic(folder.path() / "file" / "below", "x"); },
      "file: cannot be made");
}

// The number of the next temporary file: a name that is too long for one is
// refused by all of it.
int next_temporary(const fs::path& folder) {
  try {
    write_file_atomic(folder / std::string(250, 'x'), "");
  } catch (const Error& error) {
    const std::string said = error.what();
    const std::string before = ".tmp-" + std::to_string(::getpid()) + "-";
    const size_t at = said.find(before);
    if (at == std::string::npos) return -1;
    return std::stoi(said.substr(at + before.size())) + 1;
  }
  return -1;
}

// As a container's next process finds them, whose number is the same.
TEST(Files, LeftoversOfAnEarlierProcessAreNeitherUsedNorRemoved) {
  const TemporaryFolder folder;
  const std::string file = folder.file("data");
  const int next = next_temporary(folder.path());
  ASSERT_GE(next, 0);
  std::vector<std::string> left;
  for (int i = next; i < next + 3; ++i) {
    left.push_back(file + ".tmp-" + std::to_string(::getpid()) + "-" +
                   std::to_string(i));
    std::ofstream(left.back()) << "left";
  }
  write_file_atomic(file, "new");
  EXPECT_EQ(read_file(file), "new");
  for (const auto& each : left) EXPECT_EQ(read_file(each), "left");
  EXPECT_EQ(entries_in(folder.path()), 4);
}

TEST(Files, RefusesWhatCannotBeRead) {
  const TemporaryFolder folder;
  expect_refused([&] { read_file(folder.file("none")); },
                 "none: cannot be opened: No such file or directory");
  expect_refused([&] { read_file(folder.path()); }, "is not a regular file");
  expect_refused([&] { MappedFile mapped(folder.path()); },
                 "is not a regular file");
  write_file_atomic(folder.path() / "big", "12345");
  expect_refused([&] { read_file(folder.file("big"), 4); },
                 "has 5 bytes; at most 4");
}

TEST(MappedFile, ShowsTheBytesAndMoves) {
  const TemporaryFolder folder;
  write_file_atomic(folder.path() / "data", "hello");
  MappedFile mapped(folder.path() / "data");
  ASSERT_EQ(mapped.size(), 5);
  EXPECT_EQ(static_cast<char>(mapped.bytes()[4]), 'o');
  const std::byte* address = mapped.bytes().data();
  MappedFile moved(std::move(mapped));
  EXPECT_EQ(moved.bytes().data(), address);
  EXPECT_EQ(moved.path(), folder.file("data"));
  write_file_atomic(folder.path() / "empty", "");
  moved = MappedFile(folder.path() / "empty");
  EXPECT_TRUE(moved.bytes().empty());
}

TEST(MappedFile, TellsThatTheFileBecameShorter) {
  const TemporaryFolder folder;
  write_file_atomic(folder.path() / "data", "hello");
  const MappedFile mapped(folder.path() / "data");
  mapped.require_whole();
  fs::resize_file(folder.path() / "data", 3);
  expect_refused([&] { mapped.require_whole(); },
                 "data: has become shorter: 3 bytes, and 5");
}

TEST(MappedFile, AReplacedFileIsStillWhole) {
  const TemporaryFolder folder;
  write_file_atomic(folder.path() / "data", "hello");
  const MappedFile mapped(folder.path() / "data");
  write_file_atomic(folder.path() / "data", "hi");
  mapped.require_whole();
  fs::remove(folder.path() / "data");
  mapped.require_whole();
  EXPECT_EQ(static_cast<char>(mapped.bytes()[4]), 'o');
}

TEST(MappedFile, HasItsBytesReadAhead) {
  const TemporaryFolder folder;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  write_file_atomic(folder.path() / "data", std::string(512 * page, 'x'));
  const MappedFile mapped(folder.path() / "data");
  const int file = ::open(mapped.path().c_str(), O_RDONLY);
  ASSERT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
  ::close(file);
  const auto is_here = [&](size_t place) {
    unsigned char here = 0;
    const std::byte* const at = mapped.bytes().data() + place / page * page;
    EXPECT_EQ(::mincore(const_cast<std::byte*>(at), 1, &here), 0);
    return (here & 1) != 0;
  };
  const size_t first = 300 * page + 5, last = first + 3 * page;
  // A file system in memory has them at any time.
  mapped.will_need(mapped.bytes().subspan(first, last - first + 1));
  for (int i = 0; i < 1000 && !(is_here(first) && is_here(last)); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(is_here(first) && is_here(last));
}

TEST(MappedFile, ManyAreMappedWithFewDescriptors) {
  const TemporaryFolder folder;
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit few = before;
  few.rlim_cur = 64;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<MappedFile> files;
  for (int i = 0; i < 200; ++i) {
    std::ofstream(folder.file(std::to_string(i))) << i;
    files.emplace_back(folder.file(std::to_string(i)));
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(files.at(150).size(), 3u);
}

// A pipe with nobody behind it must not be waited for.
TEST(Files, APipeIsNoFile) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  expect_refused([&] { read_file(folder.file("pipe")); },
                 "is not a regular file");
  expect_refused([&] { MappedFile mapped(folder.file("pipe")); },
                 "is not a regular file");
}

TEST(FileLock, OneHolderAtATime) {
  const TemporaryFolder folder;
  {
    const FileLock first(folder.file("lock"), "the first");
    expect_refused([&] { FileLock second(folder.file("lock"), "the second"); },
                   "lock: held by another process: the first");
  }
  const FileLock again(folder.file("lock"), "the third");
  EXPECT_EQ(read_file(folder.file("lock")), "the third");
}

TEST(PartsOfFile, ReadsWhereItIsAsked) {
  const TemporaryFolder folder;
  const std::string path = folder.file("file");
  write_file_atomic(path, "0123456789");
  const PartsOfFile parts(path);
  EXPECT_EQ(parts.size(), 10U);
  std::string text(4, ' ');
  parts.read(3, std::as_writable_bytes(std::span(text)));
  EXPECT_EQ(text, "3456");
  expect_refused(
      [&] { parts.read(8, std::as_writable_bytes(std::span(text))); },
      "file: cannot be read at byte 10: the file became shorter");
  expect_refused([&] { PartsOfFile none(folder.path()); }, "regular file");
}

// As on a network's file system that knows none.
void refuse_locks() {
  sock_filter steps[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_flock, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOLCK),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{.len = std::size(steps), .filter = steps};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

TEST(FileLock, WhereThereAreNoLocksAWarningSaysSo) {
  const TemporaryFolder folder;
  const auto go_on_without = [&] {
    refuse_locks();
    const FileLock first(folder.file("lock"), "the first");
    const FileLock second(folder.file("lock"), "the second");
    std::_Exit(0);
  };
  EXPECT_EXIT(go_on_without(), testing::ExitedWithCode(0),
              "lock: cannot be locked: .*See to it that no other run");
}

TEST(Files, FreeBytesOfAPathThatIsNotThereYet) {
  const TemporaryFolder folder;
  EXPECT_GT(free_bytes(folder.path()), 0);
  EXPECT_GT(free_bytes(folder.path() / "a" / "b" / "c"), 0);
}

}  // namespace
}  // namespace tessera

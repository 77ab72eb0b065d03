#include "tests/support/ranks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tests/support/failure_of.h"

namespace tessera::testing {
namespace {

struct Child {
  pid_t pid = 0;
  int messages = -1;  // what it says at its end
};

std::string run_rank(const comm::CommunicatorOptions& options,
                     const RankBody& body) {
  RankContextGuard guard({.rank = static_cast<int>(options.rank),
                          .world_size = static_cast<int>(options.world_size),
                          .coords = {}});
  try {
    const auto communicator = comm::make_communicator(options);
    body(*communicator);
  } catch (const std::exception& error) {
    return message_of(error);
  }
  return ::testing::Test::HasFailure() ? "an expectation failed" : "";
}

Child fork_rank(comm::CommunicatorOptions options, const std::string& file,
                const RankBody& body) {
  std::array<int, 2> ends{};
  TS_CHECK(pipe(ends.data()) == 0, "pipe");
  const pid_t pid = fork();
  TS_CHECK(pid >= 0, "fork");
  if (pid != 0) {
    close(ends[1]);
    return {pid, ends[0]};
  }
  options.store = c10::make_intrusive<c10d::FileStore>(
      file, static_cast<int>(options.world_size));
  const std::string message = run_rank(options, body);
  options.store.reset();
  const bool said = write(ends[1], message.data(), message.size()) ==
                    static_cast<ssize_t>(message.size());
  _exit(said && message.empty() ? 0 : 1);
}

RankEnd await(const Child& child) {
  RankEnd end;
  std::array<char, 4096> buffer{};
  for (ssize_t count = 0;
       (count = read(child.messages, buffer.data(), buffer.size())) > 0;) {
    end.message.append(buffer.data(), static_cast<size_t>(count));
  }
  close(child.messages);
  int status = 0;
  waitpid(child.pid, &status, 0);
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

}  // namespace

std::vector<RankEnd> fork_ranks(int64_t world_size, const std::string& backend,
                                const RankBody& body,
                                std::chrono::milliseconds timeout) {
  return fork_ranks({.backend = backend,
                     .world_size = world_size,
                     .local_world_size = world_size,
                     .timeout = timeout},
                    body);
}

std::vector<RankEnd> fork_ranks(comm::CommunicatorOptions options,
                                const RankBody& body) {
  const TemporaryFolder folder("tessera-ranks");
  std::vector<Child> children;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    children.push_back(fork_rank(options, folder.file("store"), body));
  }
  std::vector<RankEnd> ends;
  for (const Child& child : children) ends.push_back(await(child));
  return ends;
}

void run_processes(int64_t world_size, const std::string& backend,
                   const RankBody& body, std::chrono::milliseconds timeout) {
  const auto ends = fork_ranks(world_size, backend, body, timeout);
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_EQ(ends[rank].exit_code, 0)
        << "rank " << rank << ", signal " << ends[rank].signal << ": "
        << ends[rank].message;
  }
}

std::string failure_of_threads(const std::string& backend, int64_t world_size,
                               const RankBody& body) {
  return failure_of([&] {
    comm::run_threads(world_size, backend, body, std::chrono::seconds(30));
  });
}

}  // namespace tessera::testing

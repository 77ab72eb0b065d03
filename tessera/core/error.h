// Errors that name the rank, its place on the mesh, the value, the rule and the
// way out.
//
// Use:    TS_CHECK(rows % degree == 0, "zero: dim 0 (", rows, ") does not
//         divide by dp_shard=", degree, ". Use dp_shard=", nearest, ".")
//         Call sites never format the rank: it is put in front from the calling
//         thread's RankContext.
// Kinds:  TS_CHECK_CONFIG   what the user asked for is wrong      exit code 78
//         TS_CHECK_USAGE    the command line is wrong                        2
//         TS_CHECK_IO       a file or folder is wrong, missing, full        74
//         TS_CHECK_REACH    a peer or the rendezvous cannot be reached      69
//         TS_CHECK          anything else that ends a run                    1
// A programmer's error is TORCH_INTERNAL_ASSERT, never one of these.
// Threads: RankContext is thread-local; a thread that works for a rank sets it.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <exception>
#include <string>

namespace tessera {

// Exit codes of the program; an Error carries the one it ends the program with.
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,
  kUnreachable = 69,
  kInputOutput = 74,
  kStopped = 75,
  kConfig = 78,
};

class Error : public c10::Error {
 public:
  Error(ExitCode code, const std::string& message,
        c10::SourceLocation where = {});
  ExitCode exit_code() const { return code_; }

 private:
  ExitCode code_;
};

// What an exception says, without a stack trace.
std::string message_of(const std::exception& error);
// REQUIRES: it holds a std::exception.
std::string message_of(const std::exception_ptr& error);

// Who is speaking. Defaults describe a program without ranks.
struct RankContext {
  int rank = -1;  // global; -1: none
  int world_size = 1;
  std::string coords = {};  // "dp_shard=1 tp=0"; empty on a mesh of one rank
  int64_t step = -1;        // -1: not in a step
  std::string doing = {};   // "Forward 3 unit 1"; not in prefix()

  // "[rank 5/16 dp_shard=1 tp=0 step=312] ", without the parts that are unknown
  // or, of a world of one rank, say nothing; "" where none is left.
  std::string prefix() const;
};

// The calling thread's context.
RankContext& rank_context();

// Sets the calling thread's context for a scope.
class RankContextGuard {
 public:
  explicit RankContextGuard(RankContext context);
  ~RankContextGuard();
  RankContextGuard(const RankContextGuard&) = delete;
  RankContextGuard& operator=(const RankContextGuard&) = delete;

 private:
  RankContext saved_;
};

namespace detail {
[[noreturn]] void throw_error(ExitCode code, const std::string& message,
                              c10::SourceLocation where);
}  // namespace detail

}  // namespace tessera

#define TS_CHECK_CODE(cond, code, ...)                            \
  do {                                                            \
    if (C10_UNLIKELY(!(cond))) {                                  \
      ::tessera::detail::throw_error(                             \
          code, ::c10::str(__VA_ARGS__),                          \
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}); \
    }                                                             \
  } while (false)

#define TS_CHECK(cond, ...) \
  TS_CHECK_CODE(cond, ::tessera::ExitCode::kFailed, __VA_ARGS__)
#define TS_CHECK_CONFIG(cond, ...) \
  TS_CHECK_CODE(cond, ::tessera::ExitCode::kConfig, __VA_ARGS__)
#define TS_CHECK_USAGE(cond, ...) \
  TS_CHECK_CODE(cond, ::tessera::ExitCode::kUsage, __VA_ARGS__)
#define TS_CHECK_IO(cond, ...) \
  TS_CHECK_CODE(cond, ::tessera::ExitCode::kInputOutput, __VA_ARGS__)
#define TS_CHECK_REACH(cond, ...) \
  TS_CHECK_CODE(cond, ::tessera::ExitCode::kUnreachable, __VA_ARGS__)

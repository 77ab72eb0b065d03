#include "tessera/core/thread_stack.h"

#include <c10/util/Type.h>
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <span>
#include <sstream>
#include <string_view>
#include <thread>

namespace tessera {
namespace {

constexpr int kSignal = SIGURG;  // ignored where no handler is there
constexpr auto kPatience = std::chrono::milliseconds(300);
constexpr int kMostFrames = 64;
// The handler itself, and what returns from it.
constexpr int kFramesOfHandler = 2;

// One answer at a time. It is static: a handler may come late.
enum class Answer { kNone, kAsked, kWriting, kThere };
std::atomic<Answer> answer{Answer::kNone};
std::atomic<pid_t> asked{0};
std::array<void*, kMostFrames> frames;
int num_frames = 0;

void on_signal(int) {
  const int saved = errno;
  auto expected = Answer::kAsked;
  if (asked == this_thread() &&
      answer.compare_exchange_strong(expected, Answer::kWriting)) {
    num_frames = backtrace(frames.data(), kMostFrames);
    answer = Answer::kThere;
  }
  errno = saved;
}

// The addresses; none where it did not answer.
std::span<void* const> ask(pid_t thread) {
  asked = thread;
  answer = Answer::kAsked;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  if (syscall(SYS_tgkill, getpid(), thread, kSignal) != 0) {
    answer = Answer::kNone;
    return {};
  }
  while (answer != Answer::kThere) {
    auto expected = Answer::kAsked;
    if (std::chrono::steady_clock::now() > end &&
        answer.compare_exchange_strong(expected, Answer::kNone)) {
      return {};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::span all(frames.data(), num_frames);
  return all.subspan(std::min<size_t>(kFramesOfHandler, all.size()));
}

// The functions of the program itself, those that it does not export too.
class ProgramSymbols {
 public:
  ProgramSymbols() : file_("/proc/self/exe", std::ios::binary) {
    const auto header = read<Elf64_Ehdr>(0, 1);
    if (header.empty()) return;
    is_fixed_ = header[0].e_type == ET_EXEC;
    const auto sections =
        read<Elf64_Shdr>(header[0].e_shoff, header[0].e_shnum);
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) {
        continue;
      }
      const Elf64_Shdr& names = sections[section.sh_link];
      symbols_ = read<Elf64_Sym>(section.sh_offset,
                                 section.sh_size / sizeof(Elf64_Sym));
      names_ = read<char>(names.sh_offset, names.sh_size);
      names_.push_back(0);
    }
  }

  // Whether the object that lies at `base` is the program.
  static bool is_at(const void* base) {
    Dl_info program{};
    const auto entry = static_cast<uintptr_t>(getauxval(AT_ENTRY));
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    return dladdr(reinterpret_cast<void*>(entry), &program) != 0 &&
           program.dli_fbase == base;
  }

  // Of the function that is there; "": none that is known.
  std::string at(const char* address, const char* base) const {
    const auto place = static_cast<uint64_t>(
        is_fixed_ ? reinterpret_cast<uintptr_t>(address) : address - base);
    for (const Elf64_Sym& symbol : symbols_) {
      if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC &&
          symbol.st_value <= place &&
          place - symbol.st_value < symbol.st_size &&
          symbol.st_name < names_.size()) {
        return names_.data() + symbol.st_name;
      }
    }
    return "";
  }

 private:
  // Nothing where they are not there.
  template <typename T>
  std::vector<T> read(uint64_t offset, uint64_t count) {
    std::vector<T> found(count);
    const auto bytes = static_cast<std::streamsize>(count * sizeof(T));
    file_.seekg(static_cast<std::streamoff>(offset));
    file_.read(reinterpret_cast<char*>(found.data()), bytes);
    if (!file_) found.clear();
    return found;
  }

  std::ifstream file_;
  bool is_fixed_ = false;  // lies where its symbols say
  std::vector<Elf64_Sym> symbols_;
  std::vector<char> names_;
};

std::string function_at(void* return_address, const ProgramSymbols& program) {
  Dl_info info{};
  // It is behind the call, which may be the last thing of a function.
  const char* const address = static_cast<char*>(return_address) - 1;
  if (dladdr(address, &info) == 0) return "?";
  const auto* const base = static_cast<char*>(info.dli_fbase);
  std::string name =
      ProgramSymbols::is_at(base) ? program.at(address, base) : "";
  if (name.empty() && info.dli_sname != nullptr) name = info.dli_sname;
  if (!name.empty()) return short_function_name(c10::demangle(name.c_str()));
  std::ostringstream text;
  text << std::filesystem::path(info.dli_fname).filename().string() << "+0x"
       << std::hex << address - base;
  return text.str();
}

}  // namespace

pid_t this_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

std::vector<std::string> stack_of(pid_t thread) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  void* first = nullptr;
  backtrace(&first, 1);  // loads what a handler must not load
  struct sigaction action{}, before{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(kSignal, &action, &before);
  const auto addresses = ask(thread);
  sigaction(kSignal, &before, nullptr);
  std::vector<std::string> names;
  if (addresses.empty()) return names;
  const ProgramSymbols program;
  for (void* const address : addresses) {
    names.push_back(function_at(address, program));
  }
  return names;
}

std::string short_function_name(const std::string& demangled) {
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";
  std::string name;
  int depth = 0;  // of <>
  for (size_t i = 0; i < demangled.size(); ++i) {
    const char letter = demangled[i];
    if (demangled.compare(i, kUnnamed.size(), kUnnamed) == 0) {
      i += kUnnamed.size() - 1;
    } else if (letter == '(' && depth == 0) {
      if (name.ends_with("operator")) name += "()";
      break;
    } else if (letter == '<') {
      ++depth;
    } else if (letter == '>') {
      --depth;
    } else if (depth == 0) {
      name += letter;
    }
  }
  if (const size_t lambda = name.find("::{lambda"); lambda != name.npos) {
    name.erase(lambda);
  }
  // What a template returns stands before its name.
  if (const size_t space = name.rfind(' '); space != std::string::npos) {
    name.erase(0, space + 1);
  }
  return name;
}

}  // namespace tessera

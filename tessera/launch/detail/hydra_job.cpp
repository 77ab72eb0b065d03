#include "tessera/launch/detail/hydra_job.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace tessera::launch {
namespace {

constexpr const char* kProxy = "hydra_pmi_proxy";

struct Process {
  std::string name;
  pid_t parent = 0;
};

// From "PID (NAME) STATE PARENT ..."; NAME may hold spaces and brackets.
Process read_process(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t begin = line.find('(');
  const size_t end = line.rfind(") ");
  if (begin == std::string::npos || end == std::string::npos) return {};
  const size_t parent = line.find(' ', end + 2);
  return {.name = line.substr(begin + 1, end - begin - 1),
          .parent = static_cast<pid_t>(
              std::strtol(line.c_str() + parent, nullptr, 10))};
}

}  // namespace

std::string hydra_job() {
  for (pid_t pid = getppid(); pid > 1;) {
    const Process process = read_process(pid);
    if (process.name == kProxy) return "hydra-" + std::to_string(pid);
    pid = process.parent;
  }
  return "";
}

}  // namespace tessera::launch

#include "tessera/benchmark/circumstances.h"

#include <c10/util/StringUtil.h>

namespace tessera::benchmark {
namespace {

std::string counted(int64_t count, const char* what) {
  return c10::str(count, " ", what, count == 1 ? "" : "s");
}

std::string who(const Circumstances& around) {
  if (around.ranks == 0) return counted(around.threads, "thread");
  std::string text = counted(around.ranks, "rank");
  if (around.ranks > 1) text += " (" + around.ranks_are + ")";
  if (around.threads > 0) text += " of " + counted(around.threads, "thread");
  return text;
}

}  // namespace

std::string heading_of(const Circumstances& around) {
  return c10::str("# ", around.command, "\n# ", who(around), " on ",
                  around.cores, " cores of ", around.host, ", ",
                  around.processor, around.vectors.empty() ? "" : ", ",
                  around.vectors, "\n# ", around.build, "\n");
}

tessera::detail::Json json_of(const Circumstances& around) {
  tessera::detail::Json json = {{"command", around.command},
                                {"host", around.host},
                                {"processor", around.processor},
                                {"cores", around.cores},
                                {"build", around.build}};
  if (!around.vectors.empty()) json["vectors"] = around.vectors;
  if (around.threads > 0) json["threads"] = around.threads;
  if (around.ranks > 0) {
    json["ranks"] = around.ranks;
    json["ranks_are"] = around.ranks_are;
  }
  return json;
}

}  // namespace tessera::benchmark

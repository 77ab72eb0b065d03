// What tests/parity/test_chat_templates.py runs: the chat template of a
// tokenizer's folder on conversations.
//
//   chat_driver render FOLDER JOBS OUT   JOBS: JSON lines with messages, tools,
//                                        add_generation_prompt; OUT: JSON lines
//                                        with text and answers, or error
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/data/chat_template.h"

namespace {

using namespace tessera;
using Json = nlohmann::ordered_json;

Json render(const data::ChatTemplate& chat, const Json& job) {
  data::ChatOptions options;
  options.add_generation_prompt = job.at("add_generation_prompt");
  if (!job.at("tools").is_null()) options.tools = job.at("tools").dump();
  try {
    const data::RenderedChat rendered =
        chat.render_json(job.at("messages").dump(), options);
    return {{"text", rendered.text}, {"answers", rendered.answers}};
  } catch (const Error& error) {
    return {{"error", error.what_without_backtrace()}};
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> args(argv + 1, argv + argc);
    TS_CHECK_USAGE(args.size() == 4 && args[0] == "render",
                   "chat_driver render FOLDER JOBS OUT");
    const auto chat = data::ChatTemplate::find(args[1]);
    TS_CHECK_CONFIG(chat.has_value(), args[1], ": has no chat template.");
    std::ifstream jobs(args[2]);
    std::ofstream out(args[3]);
    for (std::string line; std::getline(jobs, line);) {
      out << render(*chat, Json::parse(line)).dump() << '\n';
    }
    return 0;
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "%s\n", message_of(error).c_str());
    return 1;
  }
}

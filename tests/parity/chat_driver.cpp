// What tests/parity/test_chat_templates.py runs: the chat template of a
// tokenizer's folder on conversations.
//
//   chat_driver render FOLDER JOBS OUT   JOBS: JSON lines with messages, tools,
//                                        add_generation_prompt; OUT: JSON lines
//                                        with text and answers, or error
//   chat_driver encode FOLDER DATA OUT [TOKENS]
//                                        DATA: conversations, each of use up to
//                                        so many tokens; OUT: JSON lines with
//                                        ids and answers of each list
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/data/chat_encoder.h"
#include "tessera/data/chat_template.h"
#include "tessera/data/conversation.h"
#include "tessera/data/tokenizer.h"

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

void encode(const std::string& folder, const std::string& path,
            std::ofstream& out, int64_t max_tokens) {
  const auto tokenizer = data::Tokenizer::load(folder);
  const data::ChatEncoder encoder(tokenizer, data::ChatTemplate::find(folder),
                                  tokenizer.end_of_text());
  data::Conversations conversations(path);
  while (const auto conversation = conversations.next()) {
    Json lists = Json::array();
    for (const data::ChatTokens& tokens :
         encoder.encode(*conversation, max_tokens)) {
      lists.push_back({{"ids", tokens.ids}, {"answers", tokens.answers}});
    }
    out << lists.dump() << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> args(argv + 1, argv + argc);
    TS_CHECK_USAGE(args.size() == 4 || args.size() == 5,
                   "chat_driver VERB FOLDER IN OUT [TOKENS]");
    std::ofstream out(args[3]);
    if (args[0] == "encode") {
      encode(args[1], args[2], out,
             args.size() == 5 ? std::stoll(args[4]) : INT64_MAX);
      return 0;
    }
    const auto chat = data::ChatTemplate::find(args[1]);
    TS_CHECK_CONFIG(chat.has_value(), args[1], ": has no chat template.");
    std::ifstream jobs(args[2]);
    for (std::string line; std::getline(jobs, line);) {
      out << render(*chat, Json::parse(line)).dump() << '\n';
    }
    return 0;
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "%s\n", message_of(error).c_str());
    return 1;
  }
}

// How conversations become samples: what of the configuration's section data is
// for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

struct ChatForm {
  // A file; "": the one beside the tokenizer, where there is one; "none".
  std::string chat_template = "";
  std::vector<std::string> pair = {};  // keys of prompt and answer
  std::string loss_on = "answers";     // or "all"
  bool packing = false;                // several conversations in a sample
  std::string tokenizer = "";          // tokenizer.json or its folder
  int64_t seq_len = 0;                 // tokens of a sample
};

}  // namespace tessera::data

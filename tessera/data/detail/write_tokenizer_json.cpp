#include "tessera/core/detail/json.h"
#include "tessera/data/detail/splitter.h"
#include "tessera/data/detail/tokenizer_json.h"

namespace tessera::data::detail {
namespace {

using tessera::detail::Json;

Json byte_level_json(bool add_prefix_space, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

Json pre_tokenizer_json(const TokenizerSpec& spec) {
  if (spec.pattern == SplitPattern::kGpt2) {
    return byte_level_json(spec.add_prefix_space, true);
  }
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", regex_of(spec.pattern)}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  return {{"type", "Sequence"},
          {"pretokenizers", {split, byte_level_json(false, false)}}};
}

Json added_tokens_json(const TokenizerSpec& spec) {
  Json list = Json::array();
  for (const AddedToken& token : spec.added) {
    list.push_back({{"id", token.id},
                    {"content", token.content},
                    {"single_word", false},
                    {"lstrip", false},
                    {"rstrip", false},
                    {"normalized", token.normalized},
                    {"special", token.special}});
  }
  return list;
}

std::string content_of(const TokenizerSpec& spec, int64_t id) {
  for (const AddedToken& token : spec.added) {
    if (token.id == id) return token.content;
  }
  return spec.tokens.at(id);
}

Json text_json(const char* name, int type_id) {
  return {{"Sequence", {{"id", name}, {"type_id", type_id}}}};
}

// The ids around a text, as a template; around a pair of texts nothing.
Json post_processor_json(const TokenizerSpec& spec) {
  if (spec.before.empty() && spec.after.empty()) {
    return byte_level_json(true, true);
  }
  Json single = Json::array();
  Json tokens = Json::object();
  const auto add = [&](int64_t id) {
    const std::string content = content_of(spec, id);
    single.push_back({{"SpecialToken", {{"id", content}, {"type_id", 0}}}});
    tokens[content] = {{"id", content}, {"ids", {id}}, {"tokens", {content}}};
  };
  for (const int64_t id : spec.before) add(id);
  single.push_back(text_json("A", 0));
  for (const int64_t id : spec.after) add(id);
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", {text_json("A", 0), text_json("B", 1)}},
          {"special_tokens", tokens}};
}

// Written line by line: an ordered object of 100,000 keys is slow to fill.
std::string vocabulary_lines(const TokenizerSpec& spec) {
  std::string lines;
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (spec.tokens[id].empty()) continue;
    lines += (lines.empty() ? "\n      " : ",\n      ") +
             Json(spec.tokens[id]).dump() + ": " + std::to_string(id);
  }
  return lines;
}

std::string merge_lines(const TokenizerSpec& spec) {
  std::string lines;
  for (const auto& [left, right] : spec.merges) {
    lines += (lines.empty() ? "\n      " : ",\n      ") +
             Json({spec.tokens[left], spec.tokens[right]}).dump();
  }
  return lines;
}

}  // namespace

std::string write_tokenizer_json(const TokenizerSpec& spec) {
  const Json head = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added_tokens_json(spec)},
      {"normalizer", spec.nfc ? Json::object({{"type", "NFC"}}) : Json()},
      {"pre_tokenizer", pre_tokenizer_json(spec)},
      {"post_processor", post_processor_json(spec)},
      {"decoder", byte_level_json(true, true)}};
  std::string text = head.dump(2);
  text.resize(text.rfind('\n'));  // the closing brace comes at the end
  text += ",\n  \"model\": {\n";
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix",
                          "end_of_word_suffix"}) {
    text += std::string("    \"") + key + "\": null,\n";
  }
  text += "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n";
  text += std::string("    \"ignore_merges\": ") +
          (spec.ignore_merges ? "true" : "false") + ",\n";
  text += "    \"vocab\": {" + vocabulary_lines(spec) + "\n    },\n";
  text += "    \"merges\": [" + merge_lines(spec) + "\n    ]\n  }\n}\n";
  return text;
}

std::string write_tokenizer_config(const TokenizerSpec& spec,
                                   const std::string& end_of_text) {
  Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false}};
  if (!spec.before.empty()) {
    config["bos_token"] = content_of(spec, spec.before[0]);
  }
  if (!end_of_text.empty()) config["eos_token"] = end_of_text;
  return config.dump(2) + "\n";
}

}  // namespace tessera::data::detail

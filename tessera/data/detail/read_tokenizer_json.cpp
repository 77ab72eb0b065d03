#include "tessera/data/detail/tokenizer_json.h"

#include <unordered_map>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/data/detail/bpe.h"
#include "tessera/data/detail/splitter.h"

namespace tessera::data::detail {
namespace {

using tessera::detail::as_bool;
using tessera::detail::as_int;
using tessera::detail::as_string;
using tessera::detail::Json;

// An id above this is a mistake, not a vocabulary.
constexpr int64_t kMaxId = int64_t{1} << 24;

class Reader {
 public:
  Reader(const Json& root, std::string source)
      : root_(root), source_(std::move(source)) {}

  TokenizerSpec read() {
    check(root_.is_object(), "", "is not an object");
    refuse_unless_null("truncation");
    refuse_unless_null("padding");
    read_model(member(root_, "model", ""));
    read_added_tokens();
    read_normalizer(optional(root_, "normalizer"));
    read_pre_tokenizer(member(root_, "pre_tokenizer", ""));
    read_post_processor(optional(root_, "post_processor"));
    read_decoder(optional(root_, "decoder"));
    return std::move(spec_);
  }

 private:
  template <typename... Args>
  void check(bool condition, const std::string& piece,
             const Args&... complaint) const {
    TS_CHECK_IO(condition, source_, ": ", piece, piece.empty() ? "" : " ",
                complaint...);
  }
  std::string where(const std::string& piece) const {
    return source_ + ": " + piece;
  }

  const Json& member(const Json& object, const std::string& key,
                     const std::string& piece) const {
    check(object.is_object() && object.contains(key), piece, "has no '", key,
          "'");
    return object[key];
  }
  static const Json& optional(const Json& object, const std::string& key) {
    static const Json null;
    return object.is_object() && object.contains(key) ? object[key] : null;
  }
  bool flag(const Json& object, const std::string& key,
            const std::string& piece, bool absent) const {
    const Json& value = optional(object, key);
    return value.is_null() ? absent : as_bool(value, where(piece + "." + key));
  }
  std::string type_of(const Json& object, const std::string& piece) const {
    return as_string(member(object, "type", piece), where(piece + ".type"));
  }
  void refuse_unless_null(const std::string& key) const {
    check(optional(root_, key).is_null(), key,
          "is not supported: it would cut or fill up every text. Set it to "
          "null.");
  }
  void refuse_flag(const Json& object, const std::string& key,
                   const std::string& piece) const {
    check(!flag(object, key, piece, false), piece, "has ", key,
          ", which is not supported");
  }

  void read_model(const Json& model) {
    // Files of the first versions have no type; what they hold is BPE's.
    const std::string type =
        model.contains("type") ? type_of(model, "model") : "BPE";
    check(type == "BPE", "model", "of type ", type,
          " is not supported; byte-level BPE is");
    check(optional(model, "dropout").is_null(), "model.dropout",
          "is not supported: ids would differ from one run to the next");
    for (const char* key :
         {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = optional(model, key);
      check(value.is_null() || value == Json(std::string()),
            std::string("model.") + key, "is not supported");
    }
    refuse_flag(model, "byte_fallback", "model");
    spec_.ignore_merges = flag(model, "ignore_merges", "model", false);
    read_vocabulary(member(model, "vocab", "model"));
    read_merges(member(model, "merges", "model"));
  }

  void read_vocabulary(const Json& vocab) {
    check(vocab.is_object(), "model.vocab", "is not an object");
    for (const auto& [token, value] : vocab.items()) {
      const int64_t id = as_int(value, where("model.vocab['" + token + "']"));
      check(!token.empty(), "model.vocab", "has a token without characters");
      set_token(id, token, "model.vocab");
      ids_.emplace(token, static_cast<uint32_t>(id));
    }
  }

  void set_token(int64_t id, const std::string& token,
                 const std::string& piece) {
    check(id >= 0 && id <= kMaxId, piece, "has '", token, "' with the id ", id,
          "; ids are 0 to ", kMaxId);
    if (id >= static_cast<int64_t>(spec_.tokens.size())) {
      spec_.tokens.resize(id + 1);
    }
    std::string& place = spec_.tokens[id];
    check(place.empty() || place == token, piece, "gives the id ", id, " to '",
          token, "' and to '", place, "'");
    place = token;
  }

  void read_merges(const Json& merges) {
    check(merges.is_array(), "model.merges", "is not an array");
    spec_.merges.reserve(merges.size());
    for (const Json& merge : merges) {
      const std::string piece =
          "model.merges[" + std::to_string(spec_.merges.size()) + "]";
      const auto [left, right] = halves(merge, piece);
      id_of(left + right, piece);
      spec_.merges.emplace_back(id_of(left, piece), id_of(right, piece));
    }
  }

  // A merge is ["a", "b"], or "a b" in older files.
  std::pair<std::string, std::string> halves(const Json& merge,
                                             const std::string& piece) const {
    if (merge.is_array()) {
      check(merge.size() == 2, piece, "is not a pair");
      return {as_string(merge[0], where(piece)),
              as_string(merge[1], where(piece))};
    }
    const std::string text = as_string(merge, where(piece));
    const size_t space = text.find(' ');
    check(space != std::string::npos &&
              text.find(' ', space + 1) == std::string::npos,
          piece, "is not two tokens with a space between: '", text, "'");
    return {text.substr(0, space), text.substr(space + 1)};
  }

  uint32_t id_of(const std::string& token, const std::string& piece) const {
    const auto found = ids_.find(token);
    check(found != ids_.end(), piece, "needs '", token,
          "', which model.vocab does not have");
    return found->second;
  }

  void read_added_tokens() {
    const Json& added = optional(root_, "added_tokens");
    if (added.is_null()) return;
    check(added.is_array(), "added_tokens", "is not an array");
    for (const Json& entry : added) {
      AddedToken token;
      const std::string piece =
          "added_tokens[" + std::to_string(spec_.added.size()) + "]";
      token.id = as_int(member(entry, "id", piece), where(piece + ".id"));
      token.content =
          as_string(member(entry, "content", piece), where(piece + ".content"));
      token.special = flag(entry, "special", piece, false);
      token.normalized = flag(entry, "normalized", piece, !token.special);
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        refuse_flag(entry, key, piece + " '" + token.content + "'");
      }
      check(!token.content.empty(), piece, "has no content");
      check_added_id(token, piece);
      spec_.added.push_back(std::move(token));
    }
  }

  // Hugging Face takes the model's id of a token that the model has.
  void check_added_id(const AddedToken& token, const std::string& piece) {
    check(token.id >= 0 && token.id <= kMaxId, piece, "has the id ", token.id,
          "; ids are 0 to ", kMaxId);
    const auto in_model = ids_.find(token.content);
    check(in_model == ids_.end() || in_model->second == token.id, piece, "'",
          token.content, "' has the id ", token.id,
          ", but another in model.vocab");
    const auto id = static_cast<size_t>(token.id);
    check(in_model != ids_.end() || id >= spec_.tokens.size() ||
              spec_.tokens[id].empty(),
          piece, "'", token.content, "' has the id ", token.id,
          ", which model.vocab gives to another token");
    const auto& other = added_.emplace(token.id, token.content).first->second;
    check(other == token.content, piece, "'", token.content, "' has the id ",
          token.id, " of '", other, "'");
  }

  void read_normalizer(const Json& normalizer) {
    if (normalizer.is_null()) return;
    const std::string type = type_of(normalizer, "normalizer");
    check(type == "NFC", "normalizer", "of type ", type,
          " is not supported; null and NFC are");
    spec_.nfc = true;
  }

  void read_pre_tokenizer(const Json& pre_tokenizer) {
    const std::string type = type_of(pre_tokenizer, "pre_tokenizer");
    if (type == "ByteLevel") {
      check(flag(pre_tokenizer, "use_regex", "pre_tokenizer", true),
            "pre_tokenizer", "ByteLevel without use_regex is not supported");
      return read_byte_level(pre_tokenizer, "pre_tokenizer");
    }
    check(type == "Sequence", "pre_tokenizer", "of type ", type,
          " is not supported; ByteLevel, and Sequence of Split and ByteLevel, "
          "are");
    const std::string piece = "pre_tokenizer.pretokenizers";
    const Json& parts = member(pre_tokenizer, "pretokenizers", "pre_tokenizer");
    check(parts.is_array() && !parts.empty(), piece, "is not a list of parts");
    for (const Json& part : parts) {
      const std::string part_type = type_of(part, piece);
      check(part_type == "Split" || part_type == "ByteLevel", piece, "has ",
            part_type, ", which is not supported; Split and ByteLevel are");
    }
    check(parts.size() == 2 && parts[0]["type"] == "Split" &&
              parts[1]["type"] == "ByteLevel",
          piece, "is not one Split and one ByteLevel, in this order");
    read_split(parts[0], piece + "[0] Split");
    check(!flag(parts[1], "use_regex", piece, true), piece,
          "has a ByteLevel with use_regex after a Split: not supported");
    read_byte_level(parts[1], piece + "[1] ByteLevel");
    check(!spec_.add_prefix_space, piece,
          "has add_prefix_space after a Split: not supported");
  }

  void read_byte_level(const Json& byte_level, const std::string& piece) {
    spec_.add_prefix_space = flag(byte_level, "add_prefix_space", piece, true);
  }

  void read_split(const Json& split, const std::string& piece) {
    const Json& pattern = member(split, "pattern", piece);
    check(pattern.is_object() && pattern.contains("Regex"), piece,
          "has no Regex, and a plain string is not supported");
    const std::string regex = as_string(pattern["Regex"], where(piece));
    const auto known = pattern_of(regex);
    check(known.has_value(), piece,
          "has an expression that is not known: ", regex,
          ". Known are those of GPT-2, Llama-3 and Qwen2.");
    spec_.pattern = *known;
    const std::string behavior =
        as_string(member(split, "behavior", piece), where(piece));
    const bool invert = flag(split, "invert", piece, false);
    // The expressions match all of a text, so both give the matches.
    check((behavior == "Isolated" && !invert) ||
              (behavior == "Removed" && invert),
          piece, "with behavior ", behavior, invert ? " and invert" : "",
          " is not supported");
  }

  void read_post_processor(const Json& processor) {
    if (processor.is_null()) return;
    const std::string type = type_of(processor, "post_processor");
    if (type == "ByteLevel") return;  // concerns offsets, not ids
    if (type == "Sequence") {
      for (const Json& part :
           member(processor, "processors", "post_processor")) {
        read_post_processor(part);
      }
      return;
    }
    check(type == "TemplateProcessing", "post_processor", "of type ", type,
          " is not supported; ByteLevel, TemplateProcessing and their Sequence "
          "are");
    check(spec_.before.empty() && spec_.after.empty(), "post_processor",
          "has two templates");
    read_template(processor);
  }

  void read_template(const Json& processor) {
    const std::string piece = "post_processor.single";
    const Json& parts = member(processor, "single", "post_processor");
    check(parts.is_array(), piece, "is not an array");
    bool text_seen = false;
    for (const Json& part : parts) {
      if (part.contains("Sequence")) {
        check(!text_seen, piece, "has the text twice");
        text_seen = true;
        continue;
      }
      const std::string name =
          as_string(member(member(part, "SpecialToken", piece), "id", piece),
                    where(piece));
      const Json& tokens =
          member(processor, "special_tokens", "post_processor");
      for (const Json& id : member(member(tokens, name, piece), "ids", piece)) {
        auto& side = text_seen ? spec_.after : spec_.before;
        side.push_back(as_int(id, where(piece)));
      }
    }
    check(text_seen, piece, "has no place for the text");
  }

  void read_decoder(const Json& decoder) {
    if (decoder.is_null()) return;
    const std::string type = type_of(decoder, "decoder");
    check(type == "ByteLevel", "decoder", "of type ", type,
          " is not supported; ByteLevel is");
  }

  const Json& root_;
  std::string source_;
  TokenizerSpec spec_;
  IdOfToken ids_;
  std::unordered_map<int64_t, std::string> added_;  // by their ids
};

}  // namespace

TokenizerSpec read_tokenizer_json(const std::string& text,
                                  const std::string& source) {
  const Json root = tessera::detail::parse_json(text, source);
  return Reader(root, source).read();
}

}  // namespace tessera::data::detail

// What a byte-level BPE tokenizer is, as data: what tokenizer.json says of it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::data {

// How text is cut into words before merging.
enum class SplitPattern {
  kGpt2,
  kLlama3,  // also the one of cl100k_base
  kQwen2,   // kLlama3 with every digit by itself
};

// Where a long text may be cut, so that its parts have the ids of the whole:
// see detail/sections.h.
enum class SectionEnds {
  kNone,
  kBeforeSpaces,   // the tokenizer puts one before a part that begins with none
  kBehindLetters,  // before a space, a line break or a full-width stop
};

// A token that is found in the text before anything else happens to it.
struct AddedToken {
  int64_t id = 0;
  std::string content;
  bool special = true;      // left out of decoded text unless asked for
  bool normalized = false;  // looked for after the normalizer, not before
};

struct TokenizerSpec {
  // By id, in the byte-level alphabet; "": no token has this id. Added tokens
  // that the merges cannot make are not among them.
  std::vector<std::string> tokens;
  // The ids of two tokens whose concatenation is a token; first ones first.
  std::vector<std::pair<uint32_t, uint32_t>> merges;
  std::vector<AddedToken> added;
  SplitPattern pattern = SplitPattern::kGpt2;
  bool nfc = false;               // text is normalized to form C first
  bool add_prefix_space = false;  // text that begins with no space gets one
  bool ignore_merges = false;     // a word that is a token is taken whole
  // What encoding with special tokens puts around a text.
  std::vector<int64_t> before;
  std::vector<int64_t> after;
  // Named as the end of a text, beside tokenizer.json; "": none is.
  std::string eos_token = "";
};

}  // namespace tessera::data

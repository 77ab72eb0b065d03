// Finds added tokens in text, before it is cut into words.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "tessera/data/tokenizer_spec.h"

namespace tessera::data::detail {

class AddedTokenFinder {
 public:
  void add(const AddedToken& token);
  // REQUIRES: called once, after the last add().
  void finish();

  struct Found {
    size_t begin = 0;
    size_t end = 0;
    int64_t id = -1;  // -1: no token to the end of the text
  };
  // The first token at or behind `from`; of those that begin at one place the
  // longest.
  Found find(std::string_view text, size_t from) const;

  // A section may end within one of them.
  bool is_cut_by(SectionEnds ends) const;

 private:
  // Those that begin with one byte; longest first.
  struct Group {
    std::string_view common;  // what all of them begin with
    std::vector<const AddedToken*> tokens;
  };
  std::vector<AddedToken> tokens_;
  std::array<Group, 256> groups_;
};

}  // namespace tessera::data::detail

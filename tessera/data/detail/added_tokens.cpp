#include "tessera/data/detail/added_tokens.h"

#include <algorithm>

#include "tessera/data/detail/sections.h"

namespace tessera::data::detail {

void AddedTokenFinder::add(const AddedToken& token) {
  tokens_.push_back(token);
}

void AddedTokenFinder::finish() {
  for (const AddedToken& token : tokens_) {
    const std::string_view content = token.content;
    Group& group = groups_[static_cast<uint8_t>(content[0])];
    if (group.tokens.empty()) group.common = content;
    const auto differ = std::mismatch(group.common.begin(), group.common.end(),
                                      content.begin(), content.end());
    group.common = {group.common.begin(), differ.first};
    group.tokens.push_back(&token);
  }
  for (Group& group : groups_) {
    std::stable_sort(group.tokens.begin(), group.tokens.end(),
                     [](const AddedToken* a, const AddedToken* b) {
                       return a->content.size() > b->content.size();
                     });
  }
}

AddedTokenFinder::Found AddedTokenFinder::find(std::string_view text,
                                               size_t from) const {
  if (tokens_.empty()) return {text.size(), text.size(), -1};
  for (size_t at = from; at < text.size(); ++at) {
    const Group& group = groups_[static_cast<uint8_t>(text[at])];
    if (group.tokens.empty()) continue;
    const std::string_view rest = text.substr(at);
    if (!rest.starts_with(group.common)) continue;
    for (const AddedToken* token : group.tokens) {
      if (rest.starts_with(token->content)) {
        return {at, at + token->content.size(), token->id};
      }
    }
  }
  return {text.size(), text.size(), -1};
}

bool AddedTokenFinder::is_cut_by(SectionEnds ends) const {
  return std::any_of(tokens_.begin(), tokens_.end(), [&](const auto& token) {
    return end_of_section(token.content, 1, ends) < token.content.size();
  });
}

}  // namespace tessera::data::detail

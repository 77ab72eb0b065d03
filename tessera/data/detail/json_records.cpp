#include "tessera/data/detail/json_records.h"

#include "tessera/core/units.h"
#include "tessera/data/detail/foreign_files.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::detail {
namespace {

std::string kind_of(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  if (value.is_boolean()) return "true or false";
  return value.is_string() ? "a text" : "a number";
}

std::string fields_of(const Json& record) {
  std::vector<std::string> names;
  for (const auto& item : record.items()) {
    names.push_back(tessera::detail::in_quotes(item.key()));
  }
  constexpr size_t kNamedAtMost = 10;
  return names.empty() ? "no field" : some_of(names, kNamedAtMost);
}

bool has_text(const Json& value) {
  return value.is_string() && !value.get_ref<const std::string&>().empty();
}

// Of a record with two texts, which may be a question and its answer.
std::string way_of_pairs(const Json& record) {
  std::vector<std::string> names;
  for (const auto& item : record.items()) {
    if (has_text(item.value())) names.push_back(item.key());
  }
  if (names.size() < 2) return "";
  return c10::str(
      ", or data.pair to the two with a prompt and its answer, as "
      "--data.format=chat --data.pair=",
      names[0], ",", names[1]);
}

}  // namespace

JsonRecords::JsonRecords(const std::string& path, std::string example)
    : file_(path), example_(std::move(example)) {
  refuse_foreign(file_);
  pieces_ = open_pieces(file_);
}

bool JsonRecords::next() {
  const std::string* piece = pieces_->next();
  if (piece != nullptr) parse(*piece);
  return piece != nullptr;
}

void JsonRecords::parse(const std::string& piece) {
  if (piece.find_first_not_of(" \t\r\n") == std::string::npos) {
    refuse(
        "column 1: not JSON: nothing between two commas, or behind the last "
        "one. Remove the comma");
  }
  const size_t wrong = find_invalid_utf8(piece);
  if (wrong != std::string_view::npos) {
    refuse(c10::str("the byte ", byte_name(static_cast<uint8_t>(piece[wrong])),
                    " at offset ", wrong, " of the ", pieces_->name(),
                    " is not UTF-8. Convert the file, as with iconv -t UTF-8"));
  }
  // Nlohmann's words speak of a text of its own: its line 1 begins this piece.
  const std::string mark = "\x01:";
  try {
    record_ = tessera::detail::parse_json(piece, mark.substr(0, 1),
                                          {.max_bytes = kMaxPieceBytes});
  } catch (const Error& error) {
    const std::string said = message_of(error);
    const size_t at = said.find(mark);
    if (at == std::string::npos) refuse(said);
    refuse_json(said.substr(at + mark.size()));
  }
  if (!record_.is_object()) {
    refuse("is " + kind_of(record_) + ", not an object as " + example_);
  }
}

// "line:column: what."
void JsonRecords::refuse_json(const std::string& said) const {
  const size_t column = said.find(':') + 1;
  const size_t colon = said.find(": ", column);
  std::string what = colon == std::string::npos ? "" : said.substr(colon + 2);
  if (what.ends_with('.')) what.pop_back();
  const std::string line = said.substr(0, column - 1);
  refuse(c10::str(line == "1" ? "" : "in its line " + line + ", ", "column ",
                  said.substr(column, colon - column), ": not JSON: ", what));
}

void JsonRecords::refuse(const std::string& what) const {
  tessera::detail::throw_error(
      ExitCode::kConfig, c10::str(place(), ": ", what, "."),
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)});
}

const std::string& JsonRecords::text_at(const std::string& field) const {
  const auto found = record_.find(field);
  if (found == record_.end()) {
    refuse(c10::str(
        "the record has no field ", tessera::detail::in_quotes(field),
        "; it has ", fields_of(record_),
        ". Set data.field to the one with the text", way_of_pairs(record_)));
  }
  if (!found->is_string()) {
    refuse(c10::str("the field ", tessera::detail::in_quotes(field), " is ",
                    kind_of(*found),
                    ", not a text. Set data.field to one that is"));
  }
  return found->get_ref<const std::string&>();
}

}  // namespace tessera::data::detail

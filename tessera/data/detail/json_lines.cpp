#include "tessera/data/detail/json_lines.h"

#include <algorithm>

#include "tessera/core/units.h"
#include "tessera/data/detail/foreign_files.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::detail {
namespace {

constexpr size_t kReadBytes = size_t{1} << 18;
constexpr size_t kMaxLineBytes = size_t{256} << 20;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

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

}  // namespace

JsonLines::JsonLines(const std::string& path) : file_(path) {
  refuse_foreign(file_);
  reader_ = open_bytes(file_);
}

bool JsonLines::next() {
  while (next_line()) {
    if (number_ == 1 && line_.starts_with(kByteOrderMark)) {
      line_.erase(0, kByteOrderMark.size());
    }
    if (is_blank(line_)) continue;
    parse();
    return true;
  }
  return false;
}

bool JsonLines::next_line() {
  for (size_t searched = at_;;) {
    const size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos || (at_end_ && at_ < buffer_.size())) {
      const size_t stop = std::min(end, buffer_.size());
      line_.assign(buffer_, at_, stop - at_);
      at_ = std::min(stop + 1, buffer_.size());
      ++number_;
      return true;
    }
    if (at_end_) return false;
    buffer_.erase(0, at_);
    at_ = 0;
    searched = buffer_.size();
    TS_CHECK_CONFIG(searched <= kMaxLineBytes, file_.path(), ":", number_ + 1,
                    ": the line is longer than ", bytes_text(kMaxLineBytes),
                    ". Write one record a line.");
    buffer_.resize(searched + kReadBytes);
    const size_t got = reader_->read(std::span(buffer_).subspan(searched));
    buffer_.resize(searched + got);
    at_end_ = got < kReadBytes;
  }
}

// nlohmann's words speak of a text of its own: its line 1 is this line.
void JsonLines::parse() {
  const size_t wrong = find_invalid_utf8(line_);
  if (wrong != std::string_view::npos) {
    refuse(c10::str("the byte ", byte_name(static_cast<uint8_t>(line_[wrong])),
                    " at offset ", wrong,
                    " of the line is not UTF-8. Convert the file, as with "
                    "iconv -t UTF-8"));
  }
  const std::string mark = "\x01:1:";
  try {
    record_ = tessera::detail::parse_json(line_, mark.substr(0, 1),
                                          {.max_bytes = kMaxLineBytes});
  } catch (const Error& error) {
    const std::string said = message_of(error);
    const size_t at = said.find(mark);
    if (at == std::string::npos) refuse(said);
    std::string what = said.substr(at + mark.size());  // "column: what."
    if (what.ends_with('.')) what.pop_back();
    const size_t colon = what.find(": ");
    refuse(c10::str("column ", what.substr(0, colon), ": not JSON: ",
                    colon == std::string::npos ? "" : what.substr(colon + 2)));
  }
  if (!record_.is_object()) {
    refuse("is " + kind_of(record_) + ", not an object as {\"text\": \"...\"}");
  }
}

std::string JsonLines::place() const {
  return c10::str(file_.path(), ":", number_);
}

void JsonLines::refuse(const std::string& what) const {
  tessera::detail::throw_error(
      ExitCode::kConfig, c10::str(place(), ": ", what, "."),
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)});
}

const std::string& JsonLines::text_at(const std::string& field) const {
  const auto found = record_.find(field);
  if (found == record_.end()) {
    refuse(c10::str("the record has no field ",
                    tessera::detail::in_quotes(field), "; it has ",
                    fields_of(record_),
                    ". Set data.field to the one with the text"));
  }
  if (!found->is_string()) {
    refuse(c10::str("the field ", tessera::detail::in_quotes(field), " is ",
                    kind_of(*found),
                    ", not a text. Set data.field to one that is"));
  }
  return found->get_ref<const std::string&>();
}

}  // namespace tessera::data::detail

#include "tessera/data/detail/record_pieces.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::data::detail {
namespace {

constexpr size_t kReadBytes = size_t{1} << 18;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
constexpr std::string_view kBlanks = " \t\r\n";

bool is_blank(std::string_view text) {
  return text.find_first_not_of(kBlanks) == std::string_view::npos;
}

// The bytes of a file, of which what is not yet used is held.
class Window {
 public:
  explicit Window(const MappedFile& file)
      : file_(file), reader_(open_bytes(file)) {
    read_more();
    if (rest().starts_with(kByteOrderMark)) use(kByteOrderMark.size());
  }

  std::string_view rest() const {
    return std::string_view(buffer_).substr(at_);
  }
  void use(size_t size) { at_ += size; }
  // False at the end of the file.
  bool read_more() {
    if (at_end_) return false;
    buffer_.erase(0, at_);
    at_ = 0;
    const size_t size = buffer_.size();
    buffer_.resize(size + kReadBytes);
    const size_t got = reader_->read(std::span(buffer_).subspan(size));
    buffer_.resize(size + got);
    at_end_ = got < kReadBytes;
    return got > 0;
  }
  // Returns how many lines end among them.
  int64_t skip_blanks() {
    int64_t lines = 0;
    do {
      const std::string_view blanks =
          rest().substr(0, rest().find_first_not_of(kBlanks));
      lines += std::ranges::count(blanks, '\n');
      use(blanks.size());
    } while (rest().empty() && read_more());
    return lines;
  }
  const std::string& path() const { return file_.path(); }
  uint64_t consumed() const { return reader_->consumed(); }

 private:
  const MappedFile& file_;
  std::unique_ptr<ByteReader> reader_;
  std::string buffer_;
  size_t at_ = 0;
  bool at_end_ = false;
};

// Follows JSON byte by byte, as far as brackets and texts go.
class Nesting {
 public:
  void see(char byte) {
    if (in_text_) {
      if (escaped_) {
        escaped_ = false;
      } else if (byte == '\\') {
        escaped_ = true;
      } else if (byte == '"') {
        in_text_ = false;
      }
      return;
    }
    if (byte == '"') in_text_ = true;
    if (byte == '{' || byte == '[') ++depth_;
    if (byte == '}' || byte == ']') --depth_;
  }
  bool is_outside() const { return depth_ <= 0 && !in_text_; }

 private:
  int64_t depth_ = 0;
  bool in_text_ = false, escaped_ = false;
};

class Lines final : public RecordPieces {
 public:
  explicit Lines(Window window) : window_(std::move(window)) {}

  const std::string* next() override {
    while (next_line()) {
      if (!is_blank(line_)) return &line_;
    }
    return nullptr;
  }
  std::string place() const override {
    return c10::str(window_.path(), ":", number_);
  }
  const char* name() const override { return "line"; }
  uint64_t consumed() const override { return window_.consumed(); }

 private:
  bool next_line() {
    size_t end = window_.rest().find('\n');
    while (end == std::string_view::npos) {
      const size_t searched = window_.rest().size();
      TS_CHECK_CONFIG(searched <= kMaxPieceBytes, window_.path(), ":",
                      number_ + 1, ": the line is longer than ",
                      bytes_text(kMaxPieceBytes), ". Write one record a line.");
      if (!window_.read_more()) break;
      end = window_.rest().find('\n', searched);
    }
    const std::string_view rest = window_.rest();
    if (rest.empty()) return false;
    line_ = rest.substr(0, end);
    window_.use(std::min(line_.size() + 1, rest.size()));
    ++number_;
    return true;
  }

  Window window_;
  std::string line_;
  int64_t number_ = 0;  // of the line, from 1
};

class Elements final : public RecordPieces {
 public:
  // REQUIRES: the window's first byte that is not blank is [.
  explicit Elements(Window window) : window_(std::move(window)) {
    line_ += window_.skip_blanks();
    window_.use(1);
  }

  const std::string* next() override {
    if (is_over_) return nullptr;
    line_ += window_.skip_blanks();
    ++number_;
    first_line_ = line_;
    const bool is_empty_list = number_ == 1 && window_.rest().starts_with(']');
    const size_t size = size_of_element();
    element_ = window_.rest().substr(0, size);
    line_ += std::ranges::count(element_, '\n');
    const char mark = window_.rest()[size];
    window_.use(size + 1);
    if (mark == ']') {
      is_over_ = true;
      check_end();
    }
    return is_empty_list ? nullptr : &element_;
  }
  std::string place() const override {
    return c10::str(window_.path(), ": record ", number_, " (line ",
                    first_line_, ")");
  }
  const char* name() const override { return "record"; }
  uint64_t consumed() const override { return window_.consumed(); }

 private:
  // Up to the comma, or the end of the list.
  size_t size_of_element() {
    Nesting nesting;
    std::string_view rest = window_.rest();
    for (size_t at = 0;; ++at) {
      if (at == rest.size()) {
        TS_CHECK_CONFIG(at <= kMaxPieceBytes, place(), ": is longer than ",
                        bytes_text(kMaxPieceBytes), ".");
        TS_CHECK_CONFIG(window_.read_more(), place(),
                        ": the file ends within the list. Is it whole?");
        rest = window_.rest();
      }
      if (nesting.is_outside() && (rest[at] == ',' || rest[at] == ']')) {
        return at;
      }
      nesting.see(rest[at]);
    }
  }

  void check_end() {
    line_ += window_.skip_blanks();
    TS_CHECK_CONFIG(window_.rest().empty(), window_.path(), ": line ", line_,
                    ": there is more behind the end of the list. Write one "
                    "record a line, in a file that is called .jsonl.");
  }

  Window window_;
  std::string element_;
  int64_t number_ = 0;                 // of the element, from 1
  int64_t line_ = 1, first_line_ = 1;  // of the file
  bool is_over_ = false;
};

std::string first_line(const MappedFile& file) {
  Lines lines{Window(file)};
  const std::string* line = lines.next();
  return line == nullptr ? "" : *line;
}

// A line that is an object from its first byte to its last: as far as brackets
// tell, so that a record with a mistake within is refused as one.
bool is_object(std::string_view line) {
  line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
  if (!line.starts_with('{')) return false;
  Nesting nesting;
  for (const char byte : line) nesting.see(byte);
  return nesting.is_outside();
}

char first_byte(const MappedFile& file) {
  Window window(file);
  window.skip_blanks();
  return window.rest().empty() ? '\0' : window.rest()[0];
}

}  // namespace

JsonName json_name_of(const std::string& path) {
  std::filesystem::path name(path);
  if (name.extension() == ".gz" || name.extension() == ".zst") {
    name.replace_extension();
  }
  const auto extension = name.extension();
  if (extension == ".json") return JsonName::kAny;
  const bool is_lines = extension == ".jsonl" || extension == ".ndjson";
  return is_lines ? JsonName::kLines : JsonName::kNone;
}

std::unique_ptr<RecordPieces> open_pieces(const MappedFile& file) {
  const JsonName name = json_name_of(file.path());
  if (name == JsonName::kLines) return std::make_unique<Lines>(Window(file));
  const char first = first_byte(file);
  if (first == '[') return std::make_unique<Elements>(Window(file));
  const bool is_told = name == JsonName::kNone || first == '\0';
  TS_CHECK_CONFIG(
      is_told || is_object(first_line(file)), file.path(),
      ": is neither lines of JSON objects nor a list of them. Write one record "
      "a line: jq -c . IN.json >OUT.jsonl, or jq -c '.KEY[]' where the records "
      "are a list within an object. To read its bytes as they are, set "
      "data.format to text or name the file .txt; to leave it out, "
      "data.exclude.");
  return std::make_unique<Lines>(Window(file));
}

}  // namespace tessera::data::detail

// The documents of a file: of text it is the whole file, of JSON lines, or of a
// JSON list, a field of each record. Any of them may be compressed, by gzip
// or Zstandard.
//
// Use:     Documents documents(path);
//          while (const auto text = documents.next()) use(*text);
// Errors:  TS_CHECK_IO: what is not UTF-8 or is damaged, with file and offset,
//          compressed text that is too long to lie in memory as a whole;
//          TS_CHECK_CONFIG: a record that is not as it should be, with file
//          and line; JSON without records, and a file of another kind
//          (Parquet), by name.
// Threads: one a reader.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::data {

struct DocumentForm {
  std::string format = "auto";  // auto | text | jsonl
  std::string field = "text";   // of a record
};

// The file's name is one of JSON: .jsonl, .ndjson or .json, and behind it maybe
// .gz or .zst. Whether it has records at all its reader sees.
bool has_json_name(const std::string& path);

class Documents {
 public:
  explicit Documents(const std::string& path, const DocumentForm& form = {});
  ~Documents();
  Documents(Documents&&) noexcept;
  Documents& operator=(Documents&&) noexcept;

  // The next document, or nothing at the end. Valid until the next call; where
  // stays(), as long as this is.
  std::optional<std::string_view> next();
  bool stays() const;
  // "file", "file:line" or "file: record N (line M)" of the document.
  std::string place() const;
  // Bytes of the file that have been read, for whoever shows progress.
  uint64_t consumed() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::data

// The records of a file of JSON lines, plain or compressed: an object a line.
//
// Lines of white space alone are passed over, and a byte order mark at the
// start. A file is read as it goes: no more than a line is held.
// Use:     JsonLines lines(path);
//          while (lines.next()) use(lines.record());
// Errors:  TS_CHECK_CONFIG with file, line and column: what is not UTF-8, no
//          JSON or no object, and what refuse() is told; TS_CHECK_IO where the
//          file cannot be read.
// Threads: one a reader.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/core/detail/json.h"
#include "tessera/data/detail/byte_reader.h"

namespace tessera::data::detail {

using tessera::detail::Json;

class JsonLines {
 public:
  explicit JsonLines(const std::string& path);

  // Goes to the next record; false: there is none.
  bool next();
  const Json& record() const { return record_; }
  // "file:line" of the record.
  std::string place() const;
  // Ends with place() and what is wrong about the record.
  [[noreturn]] void refuse(const std::string& what) const;
  // TS_CHECK_CONFIG where the record has no such field, or one that is no text.
  const std::string& text_at(const std::string& field) const;

  uint64_t consumed() const { return reader_->consumed(); }  // of the file

 private:
  bool next_line();
  void parse();

  MappedFile file_;
  std::unique_ptr<ByteReader> reader_;
  std::string buffer_;  // read, from at_ on not yet given away
  size_t at_ = 0;
  bool at_end_ = false;
  std::string line_;
  int64_t number_ = 0;  // of the line, from 1
  Json record_;
};

}  // namespace tessera::data::detail

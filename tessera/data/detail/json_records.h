// The records of a file of JSON lines, or of one JSON list, plain or
// compressed: an object each.
//
// Use:     JsonRecords records(path, "{\"text\": \"...\"}");
//          while (records.next()) use(records.record());
// Errors:  TS_CHECK_CONFIG with file and line, of a list also the record's
//          number: what is not UTF-8, no JSON or no object, and what refuse()
//          is told; also as in record_pieces.h.
// Threads: one a reader.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/core/detail/json.h"
#include "tessera/data/detail/record_pieces.h"

namespace tessera::data::detail {

using tessera::detail::Json;

class JsonRecords {
 public:
  // `example` of a record, for the message where one is no object.
  JsonRecords(const std::string& path, std::string example);

  // Goes to the next record; false: there is none.
  bool next();
  const Json& record() const { return record_; }
  // Of the record, as record_pieces.h has it.
  std::string place() const { return pieces_->place(); }
  // Ends with place() and what is wrong about the record.
  [[noreturn]] void refuse(const std::string& what) const;
  // TS_CHECK_CONFIG where the record has no such field, or one that is no text.
  const std::string& text_at(const std::string& field) const;

  uint64_t consumed() const { return pieces_->consumed(); }

 private:
  void parse(const std::string& piece);
  // "line:column" in the piece, as its reader has to look for it.
  [[noreturn]] void refuse_json(const std::string& said) const;

  MappedFile file_;
  std::string example_;
  std::unique_ptr<RecordPieces> pieces_;
  Json record_;
};

}  // namespace tessera::data::detail

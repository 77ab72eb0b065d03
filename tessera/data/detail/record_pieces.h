// The texts of a file's records: its lines, or the elements of one JSON list.
//
// What begins with [ is a list, unless the file's name is one of JSON lines. It
// is cut where its commas are; what an element is, its reader has to see. A
// byte order mark at the start is passed over. A file is read as it goes: no
// more than a piece is held.
// Errors:  TS_CHECK_CONFIG: a piece that is longer than kMaxPieceBytes, a list
//          that is cut off or has something behind it, and JSON that is neither
//          (see open_pieces); TS_CHECK_IO where the file cannot be read.
// Threads: one a reader.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/data/detail/byte_reader.h"

namespace tessera::data::detail {

// What a file's name says, behind which .gz or .zst may stand.
enum class JsonName { kNone, kLines /* .jsonl, .ndjson */, kAny /* .json */ };
JsonName json_name_of(const std::string& path);

constexpr size_t kMaxPieceBytes = size_t{256} << 20;

class RecordPieces {
 public:
  virtual ~RecordPieces() = default;
  // The next one that is not of white space alone; nullptr: there is none.
  virtual const std::string* next() = 0;
  // "file:line", or "file: record N (line M)".
  virtual std::string place() const = 0;
  // Of the piece, for messages: "line" or "record".
  virtual const char* name() const = 0;
  virtual uint64_t consumed() const = 0;  // of the file
};

// TS_CHECK_CONFIG, with the way out, on a file .json that begins with neither a
// list nor a line that is an object.
// REQUIRES: `file` outlives what is returned.
std::unique_ptr<RecordPieces> open_pieces(const MappedFile& file);

}  // namespace tessera::data::detail

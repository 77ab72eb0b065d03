#include "tessera/data/detail/foreign_files.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/data/detail/byte_reader.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::detail {
namespace {

using namespace std::string_view_literals;

struct Foreign {
  std::string_view magic;
  std::string_view what;
  std::string_view way_out;
};
constexpr std::string_view kFromUtf32 = "Convert it: iconv -f UTF-32 -t UTF-8.";
constexpr std::array kForeign = {
    Foreign{"PAR1", "Parquet",
            "Write it as JSON lines: python3 -c \"import pandas as p; "
            "p.read_parquet('IN.parquet').to_json('OUT.jsonl', "
            "orient='records', lines=True, force_ascii=False)\"."},
    Foreign{"\xfd"
            "7zXZ",
            "compressed by xz", "Unpack it, or use gzip or zstd."},
    Foreign{"BZh", "compressed by bzip2", "Unpack it, or use gzip or zstd."},
    Foreign{"PK\x03\x04", "a ZIP archive", "Unpack it."},
    // UTF-16's mark begins it too.
    Foreign{"\xff\xfe\0\0"sv, "UTF-32 text", kFromUtf32},
    Foreign{"\0\0\xfe\xff"sv, "UTF-32 text", kFromUtf32},
    Foreign{"\xff\xfe", "UTF-16 text", "Convert it: iconv -f UTF-16 -t UTF-8."},
    Foreign{"\xfe\xff", "UTF-16 text",
            "Convert it: iconv -f UTF-16 -t UTF-8."}};

// Text has no NUL; UTF-16 of letters without a mark has one in two bytes. What
// is no ASCII beside them is no UTF-8, and refused as that.
bool is_wide(std::string_view text) {
  constexpr size_t kLooked = 4096;
  const std::string_view first = text.substr(0, kLooked);
  const auto is_ascii = [](unsigned char byte) { return byte < 0x80; };
  return 4 * std::ranges::count(first, '\0') >
             static_cast<std::ptrdiff_t>(first.size()) &&
         std::ranges::all_of(first, is_ascii);
}

}  // namespace

void refuse_foreign(const MappedFile& file) {
  const std::string_view text = text_of(file);
  for (const Foreign& kind : kForeign) {
    TS_CHECK_CONFIG(!text.starts_with(kind.magic), file.path(), ": is ",
                    kind.what, ", which is not read. ", kind.way_out);
  }
  TS_CHECK_CONFIG(is_compressed(file) || !is_wide(text), file.path(),
                  ": more than a quarter of its first bytes are zero: UTF-16 "
                  "or UTF-32 text without a mark, or no text, which is not "
                  "read. Convert it: iconv -f UTF-16LE -t UTF-8, or UTF-16BE.");
}

}  // namespace tessera::data::detail

#include "tessera/data/detail/foreign_files.h"

#include <array>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/data/detail/utf8.h"

namespace tessera::data::detail {
namespace {

struct Foreign {
  std::string_view magic;
  std::string_view what;
  std::string_view way_out;
};
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
    Foreign{"\xff\xfe", "UTF-16 text", "Convert it: iconv -f UTF-16 -t UTF-8."},
    Foreign{"\xfe\xff", "UTF-16 text",
            "Convert it: iconv -f UTF-16 -t UTF-8."}};

}  // namespace

void refuse_foreign(const MappedFile& file) {
  const std::string_view text = text_of(file);
  for (const Foreign& kind : kForeign) {
    TS_CHECK_CONFIG(!text.starts_with(kind.magic), file.path(), ": is ",
                    kind.what, ", which is not read. ", kind.way_out);
  }
}

}  // namespace tessera::data::detail

// Files that people have, and that are not read: refused by name.
#pragma once

#include "tessera/core/files.h"

namespace tessera::data::detail {

// TS_CHECK_CONFIG, with a way out, on Parquet and on archives of other kinds.
void refuse_foreign(const MappedFile& file);

}  // namespace tessera::data::detail

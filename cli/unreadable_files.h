// What the program says where a mapped file gives no more bytes (SIGBUS): it
// was cut short, its file system is full, or its disk failed. Which file and
// which byte, and the exit code of a failed read.
#pragma once

namespace tessera::cli {

void name_unreadable_files();

}  // namespace tessera::cli

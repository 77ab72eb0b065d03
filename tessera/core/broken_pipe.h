// A peer or a reader that goes away, or a limit, is an error of the write, not
// the end of this process.
#pragma once

namespace tessera {

// Ignores SIGPIPE, unless the program handles it itself. For whoever serves
// sockets that strangers reach, or trains while somebody reads along.
void ignore_broken_pipes();

// Whether nobody reads any more what is written there: a pipe or a socket whose
// other end is closed.
bool is_broken_pipe(int descriptor);

// Ignores SIGXFSZ, likewise: a write beyond the limit of a file's size (ulimit
// -f) fails as one on a full disk does, by an error that names the file.
void ignore_file_size_limits();

}  // namespace tessera

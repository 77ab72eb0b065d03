// A peer or a reader that goes away is an error of the write, not the end of
// this process.
#pragma once

namespace tessera {

// Ignores SIGPIPE, unless the program handles it itself. For whoever serves
// sockets that strangers reach, or trains while somebody reads along.
void ignore_broken_pipes();

}  // namespace tessera

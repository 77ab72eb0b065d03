// What this host is called, and which processes are on one.
#pragma once

#include <string>

namespace tessera {

// As gethostname(2) has it; "localhost" where it has nothing.
std::string host_name();

// The same for processes that can share memory and reach each other by the same
// addresses: name and start of the kernel, and the namespaces of processes and
// of the network. Two hosts may share a name, two containers a kernel.
std::string host_identity();
// The name in what it gave, or in what begins with that.
std::string host_name_in(const std::string& identity);

// The same for processes that know each other by their numbers: start of the
// kernel, and the namespace of processes. Without blanks.
std::string process_space();

}  // namespace tessera

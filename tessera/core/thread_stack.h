// What a thread of this process stands in, as another thread asks it.
//
// It is interrupted by SIGURG, which nobody else may use meanwhile; calls that
// a signal interrupts (poll, sleep) end early in it. Names are those that the
// program's own symbols and the libraries' exported ones give, as in
// "tessera::data::Sampler::next"; else "libtorch_cpu.so+0x1234", for addr2line.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera {

// For another thread to ask about this one.
pid_t this_thread();

// The functions that `thread` is in, the innermost first. Empty where it has
// ended, or takes no signal within 0.3 s: it stands in the kernel. Waits for
// other callers. REQUIRES: not the calling thread.
std::vector<std::string> stack_of(pid_t thread);

// "tessera::Sampler::next" of "tessera::(anonymous namespace)::Sampler<int>::
// next(long, std::string const&) const": without what is in brackets.
std::string short_function_name(const std::string& demangled);

}  // namespace tessera

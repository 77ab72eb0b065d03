// What libraries read when they are loaded, for as long as a command computes.
#pragma once

namespace tessera::cli {

// Sets it, unless the user or the program that started this one has: for the
// processes that this one starts, and where `computes_here` for itself, for
// which it starts itself again by `argv`. Then it does not return.
//
// Threads of a rank spin while they wait for each other. Left to itself libgomp
// does so for milliseconds, and on a host that does anything else beside they
// take each other's core away: a step of some milliseconds was 1.7 to 3 times
// as long. So many turns cost nothing where the cores are free.
//
// Memory of large tensors is kept by the C library (core/kept_memory.h), on
// huge pages where the host gives them: no page fault after the first step.
void set_up_libraries(char** argv, bool computes_here);

}  // namespace tessera::cli

// What the program says where the system gives it no more memory: how many
// bytes were asked for, how many it has, and the limit that stands against it.
//
// The program's operator new throws with these words. Before main, while
// libraries set themselves up, nobody would catch it: it says so itself and
// ends the program with exit code 1.
#pragma once

namespace tessera::cli {

// From now on somebody catches it.
void begin_to_throw_out_of_memory();

}  // namespace tessera::cli

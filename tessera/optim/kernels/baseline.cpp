// See loops.inc; the flags are in the project's CMakeLists.txt.
#define TESSERA_KERNELS kBaseline
#define TESSERA_KERNELS_NAME "baseline"
#include "tessera/optim/kernels/loops.inc"

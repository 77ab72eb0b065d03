// See loops.inc; the flags are in the project's CMakeLists.txt.
#define TESSERA_KERNELS kAvx2
#define TESSERA_KERNELS_NAME "avx2"
#include "tessera/optim/kernels/loops.inc"

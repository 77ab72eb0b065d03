// See loops.inc; the flags are in the project's CMakeLists.txt.
#define TESSERA_KERNELS kAvx512
#define TESSERA_KERNELS_NAME "avx512"
#include "tessera/optim/kernels/loops.inc"

// See loops.inc; the flags are in the project's CMakeLists.txt.
#define TESSERA_KERNELS kAvx512Bf16
#define TESSERA_KERNELS_NAME "avx512_bf16"
#include "tessera/nn/kernels/loops.inc"

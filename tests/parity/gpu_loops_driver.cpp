// Compiles the loops for GPUs, for each architecture that is named, and prints
// how large the machine code is. No GPU is needed.
#include <cstdio>
#include <exception>

#include "tessera/core/error.h"
#include "tessera/nn/gpu/program.h"

int main(int argc, char** argv) {
  try {
    for (int i = 1; i < argc; ++i) {
      size_t size = 0;
      for (const int bits : {64, 32, 16}) {
        size += tessera::nn::gpu::compile(argv[i], bits).size();
      }
      std::printf("%s %zu\n", argv[i], size);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", tessera::message_of(error).c_str());
    return 1;
  }
  return 0;
}

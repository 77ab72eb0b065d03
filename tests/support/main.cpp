// The main() of every test program.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // Ranks as threads share the cores: one intra-op thread keeps results the
  // same on every machine.
  at::set_num_threads(1);
  return RUN_ALL_TESTS();
}

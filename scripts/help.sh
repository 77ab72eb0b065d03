#!/usr/bin/env bash
cat <<'TEXT'
usage: ./dev VERB

  quickstart [FOLDER]   trains a small model on two ranks: on prose from Debian,
                        or on your own text
  test [--fast] [--sanitize]
                        builds and checks everything; --fast: under two minutes
  setup                 Debian packages and LibTorch (into .venv/), where missing
  build [TARGET...]     into build/dev (TESSERA_PRESET=release|asan|tsan: there)
  build --package [--check]
                        a .deb, a .tar.gz and a wheel, into dist/; --check installs and
                        runs each where it is alone
  build --cuda [TARGET...]
                        the program beside a LibTorch with CUDA, into build/cuda
  examples              builds and runs examples/
  bench [NAME]          builds and runs bench/
  gpu-check [--pack]    tests and measures on a GPU, with one report; --pack: what that
                        needs on a machine without a network, into build/gpu-check
  fuzz [--count N] [--seed FIRST] [--experts]
                        random models and meshes beside one rank
  fmt [FILE...]         formats
  lint [FILE...]        clang-tidy
  docs                  writes docs/reference/ from the program itself
  clean                 removes build/
  help                  this

TESSERA_TORCH=FOLDER    uses the LibTorch there (FOLDER/include, FOLDER/lib)
CXX=COMPILER            another compiler than g++
TEXT

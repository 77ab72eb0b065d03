// The commands of the program, one source each; main.cpp lists them.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

// Ranks are started as this same command line.
void add_train(CLI::App& program, int argc, char** argv);
void add_bench(CLI::App& program, int argc, char** argv);
void add_bench_step(CLI::App& bench, int argc, char** argv);
void add_bench_kernels(CLI::App& bench, int argc, char** argv);
void add_eval(CLI::App& program, int argc, char** argv);
void add_generate(CLI::App& program, int argc, char** argv);
void add_tokenize(CLI::App& program);
void add_convert(CLI::App& program);
void add_inspect(CLI::App& program);
void add_completion(CLI::App& program);
void add_report(CLI::App& program);
void add_schema(CLI::App& program);
void add_verify(CLI::App& program);
void add_launch(CLI::App& program);
void add_plan(CLI::App& program);

// What main() does with a command line, in a copy of the process too. The exit
// code.
int run_program(int argc, char** argv);
// The code with which a command that did not throw ends the program.
void set_exit_code(int code);

}  // namespace tessera::cli

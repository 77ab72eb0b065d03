// tessera schema: the configuration's JSON Schema, for editors, and manuals.
#include <iostream>

#include "cli/commands.h"
#include "cli/man_page.h"
#include "tessera/core/config.h"
#include "tessera/engine/deepspeed.h"
#include "tessera/engine/run_config.h"

namespace tessera::cli {

void add_schema(CLI::App& program) {
  struct Flags {
    bool markdown = false;
    bool man = false;
    bool deepspeed = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = program.add_subcommand(
      "schema", "Print the JSON Schema of the configuration");
  CLI::Option* markdown =
      command->add_flag("--markdown", flags->markdown,
                        "the configuration's manual, in Markdown, instead");
  command
      ->add_flag("--man", flags->man,
                 "the program's page for man, with commands, flags and keys, "
                 "instead")
      ->excludes(markdown);
  command
      ->add_flag("--deepspeed", flags->deepspeed,
                 "what each key of DeepSpeed's JSON becomes, in Markdown, "
                 "instead")
      ->excludes(markdown)
      ->excludes("--man");
  command->footer(
      "Examples:\n"
      "  tessera schema > run.schema.json\n"
      "  tessera schema --man | man -l -");
  command->callback([&program, flags] {
    if (flags->deepspeed) {
      std::cout << engine::deepspeed_table();
      return;
    }
    engine::RunConfig config;
    config::Section root;
    config.declare(root);
    std::cout << (flags->man        ? man_page(program, config::entries(root))
                  : flags->markdown ? config::manual(root)
                                    : config::schema(root));
  });
}

}  // namespace tessera::cli

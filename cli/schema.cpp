// tessera schema: the JSON Schema of the configuration, for editors.
#include <iostream>

#include "cli/commands.h"
#include "tessera/core/config.h"
#include "tessera/engine/run_config.h"

namespace tessera::cli {

void add_schema(CLI::App& program) {
  auto markdown = std::make_shared<bool>(false);
  CLI::App* command = program.add_subcommand(
      "schema", "Print the JSON Schema of the configuration");
  command->add_flag("--markdown", *markdown,
                    "the configuration's manual, in Markdown, instead");
  command->callback([markdown] {
    engine::RunConfig config;
    config::Section root;
    config.declare(root);
    std::cout << (*markdown ? config::manual(root) : config::schema(root));
  });
}

}  // namespace tessera::cli

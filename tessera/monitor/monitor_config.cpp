#include "tessera/monitor/monitor_config.h"

namespace tessera::monitor {

void MonitorConfig::declare(config::Section& section) {
  section
      .key("every", every,
           "steps between progress lines; metrics.jsonl has every step")
      .at_least(1)
      .at_most(1e12);
  section
      .key("losses_late", losses_late,
           "steps that have begun behind one before the host reads its loss "
           "and norm, that a GPU with AdamW has work meanwhile: it is told, "
           "and a signal heard, so many steps later")
      .at_least(0)
      .at_most(8);
  section.key("tensorboard", tensorboard, "write events for TensorBoard");
  section.key("by_rank", by_rank,
              "every step's figures of every rank too, as lists by rank: "
              "work_s_by_rank and the like");
  section
      .key("trace", trace,
           "steps, from the second on, of which every instruction is traced; "
           "0: none")
      .at_least(0)
      .at_most(1e6);
  section
      .key(
          "replicas", replicas,
          "steps between comparisons, by hashes, of the weights and states "
          "that several ranks hold alike, and before each checkpoint; one that "
          "differs ends the run; 0: none")
      .at_least(0)
      .at_most(1e12);
  section
      .key("reruns", reruns,
           "steps between those that are computed three times more before they "
           "update, twice by the same rank and once by another: what a "
           "processor computes otherwise is told, or ends the run; 0: none")
      .at_least(0)
      .at_most(1e12);
  section
      .key("sample", sample,
           "steps between texts that the model writes, and at the last step; "
           "0: none")
      .at_least(0)
      .at_most(1e12);
  section.key("sample_prompt", sample_prompt,
              "what such a text begins with; empty: the beginning of the first "
              "sample that is validated on, else trained on: 16 tokens, of "
              "conversations all before the first target");
  section
      .key("sample_tokens", sample_tokens,
           "that it writes; fewer where the text ends, or has data.seq_len "
           "tokens")
      .at_least(1)
      .at_most(1 << 24);
  section
      .key("sample_temperature", sample_temperature,
           "of its tokens, drawn among the 50 likeliest; 0: always the "
           "likeliest")
      .at_least(0)
      .at_most(1e6);
}

}  // namespace tessera::monitor

// The section data of the configuration.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/data/sampler.h"

namespace tessera::data {

struct DataConfig {
  std::vector<std::string> train = {};  // paths or globs; a run needs one
  std::vector<std::string> valid = {};  // none: no validation
  std::vector<double> weights = {};     // of each entry of train; none: sizes
  double valid_share = 0;               // of train's samples; 0: none
  std::vector<std::string> exclude = {};
  std::string format = "auto";
  std::string field = "text";          // of JSON lines
  std::string chat_template = "";      // "": the tokenizer's; none; a file
  std::vector<std::string> pair = {};  // keys of prompt and answer
  std::string loss_on = "answers";     // of conversations; or all
  bool packing = false;                // of conversations
  bool intra_document_masking = false;
  std::string tokenizer = "";  // tokenizer.json; "": one is trained on the text
  std::vector<std::string> skip = {};  // batches, as "101:150"
  int64_t seq_len = 256;
  bool shuffle = true;
  std::string reader = "every";
  void declare(config::Section& section);
  // Whether samples may be several documents that do not see each other.
  bool documents_apart() const { return intra_document_masking || packing; }
  // The positions of `skip`, ascending; neighbours are one range.
  std::vector<Skip> skips(int64_t global_batch) const;
  // What several keys say together; TS_CHECK_CONFIG.
  void check() const;
};

}  // namespace tessera::data

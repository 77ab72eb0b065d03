// The run folder RUN_DIR/NAME and what lies where in it.
//
//   config.json      as resolved          metrics.jsonl   one line a step
//   tokenizer.json   of text data         events.*        TensorBoard
//   logs/rank-N.log                       checkpoints/{step-N/,latest,best}
//   tokenizer_config.json, chat_template.jinja   of data.tokenizer
//   samples.jsonl    where monitor.sample asks for it
//   summary.json     written at the end
//   logs/flight-rank-N.json               after a failure: the last operations
//   model_files/     of model.from, but its weights
//   trace/           where monitor.trace asks for it
//   .lock            held by the run that writes here
//
// Beside the runs, RUN_DIR/token_cache/ holds text as tokens, and tokenizers
// that were trained on it, for all of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint/local_place.h"
#include "tessera/engine/run_config.h"

namespace tessera::train {

class RunFolder {
 public:
  explicit RunFolder(const engine::RunConfig& config);

  const std::string& path() const { return path_; }
  std::string config() const { return path_ + "/config.json"; }
  std::string tokenizer() const { return path_ + "/tokenizer.json"; }
  const std::string& tokens() const { return tokens_; }
  std::string lock() const { return path_ + "/.lock"; }
  const std::string& checkpoints() const { return checkpoints_; }
  checkpoint::LocalPlace local() const { return {local_dir_, checkpoints_}; }
  std::string trace() const { return path_ + "/trace"; }
  std::string logs() const { return path_ + "/logs"; }
  std::string log_of(int64_t rank) const {
    return logs() + "/rank-" + std::to_string(rank) + ".log";
  }

  // Of the folder, those below it, and that of tokens: which are not there,
  // with what they lie in, each before what lies in it.
  std::vector<std::string> missing() const;
  // Makes the folder and those below it. TS_CHECK_IO where that is impossible.
  void create() const;
  // TS_CHECK_IO where something else than a folder is in one's place.
  void check() const;

 private:
  std::vector<std::string> below() const;
  // By which it is set to be elsewhere.
  std::string key_of(const std::string& folder) const;

  std::string path_;
  std::string tokens_;
  std::string checkpoints_;  // checkpoint.dir where that is set
  std::string local_dir_;
  bool traces_;
};

}  // namespace tessera::train
